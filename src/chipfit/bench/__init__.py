"""Experiments: quantization algorithms x hardware settings x models, each a file that anyone can run again."""
