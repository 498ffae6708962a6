"""`python -m chipfit.bench.solver.cls_quant_solver --config config.yaml`: `chipfit bench run config.yaml`."""

import os
import sys


def main() -> None:
    """Run `chipfit bench run` with MQBench's spelling of the arguments."""
    given = [word for word in sys.argv[1:] if word != "--config"]
    os.execv(sys.executable, [sys.executable, "-m", "chipfit", "bench", "run", *given])


if __name__ == "__main__":
    main()
