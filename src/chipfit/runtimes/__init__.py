"""Runtimes that load exported files: one a file, registered as "runtime" with what it needs.

A runtime is made of a file and of names of tensors that are to be readable. `run(inputs)` computes one batch and gives,
by name, first the outputs in the model's order, then those tensors that the file holds; `executed()` counts the
operators that it runs. It may have `warnings(platform)`: what a reader of a verification should know about the machine
that it ran on, a list of sentences.
"""
