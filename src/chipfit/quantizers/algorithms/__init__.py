"""Training algorithms, one a file; see `chipfit.quantizers.algorithm`."""
