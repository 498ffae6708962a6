#!/bin/sh
# The same as `chipfit bench run config.yaml`.
python -u -m chipfit.bench.solver.cls_quant_solver --config config.yaml "$@"
