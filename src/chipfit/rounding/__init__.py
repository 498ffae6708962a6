"""Rounding of weights, and ranges of activations, by the error that they cause in a network's outputs.

`methods` holds one rounding method a file, and `method` their protocol. `sequential_reconstruction` runs a float and a
quantized copy of the calibration samples through the network; for each linear operator it sums `moments` of the inputs,
for which `gptq` finds weights and scales in closed form.
"""
