"""Structured pruning: remove channels of a trained network, under limits on memory and operations."""
