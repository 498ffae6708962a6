"""Keras 3, on any of its backends: the second front door. Nothing else in chipfit imports Keras."""
