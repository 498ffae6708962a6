"""Rounding weights by what a layer does to its data: moments of its inputs, and the codes that keep its outputs.

`walk` goes through the network once with two streams of images, the float one and the quantized one; at every linear
operator `moments` are summed, and `fit` finds weights, scales and codes for them. All is closed form: no gradient.
"""
