"""Quantize, export and verify architectures of transformers, timm, keras.applications and our own.

    python -m benchmarks.zoo [--only NAME ...] [--again]

Each runs on ONNX Runtime and on LiteRT. Weights are random but reproducible, configurations and inputs small: the zoo
measures whether every operator of an architecture is supported, not accuracy. Each network runs in a process of its
own, with a time limit. `results.json` holds the results; a network that is in it runs again only with `--only` or
`--again`. `make docs` writes the page.
"""
