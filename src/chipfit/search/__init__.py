"""Sensitivity of layers and the search of bits: losses predicted from one backward pass, and an integer program."""
