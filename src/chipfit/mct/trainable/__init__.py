"""Quantizers that train, as users write them: configurations, base classes, and the way into a whole model."""
