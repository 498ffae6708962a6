"""Architectures of transformers, timm, keras.applications and our own, the whole way on ONNX Runtime and on LiteRT.

    python -m benchmarks.zoo [--only NAME ...] [--again]

Weights are random but always the same, configurations and inputs small: what is tried is whether every operator of an
architecture has its place, not its accuracy. Each network runs in a process of its own, with a limit. `results.json`
holds what was found; a network that stands there is not run again, unless it is asked for. `make docs` writes the page.
"""
