"""`python -m chipfit.bench.solver.cls_quant_solver --config config.yaml`: `chipfit bench run config.yaml`."""

import sys


def main() -> None:
    """Run the command line with the solver's own spelling."""
    from chipfit.cli.app import main as run

    given = sys.argv[1:]
    if "--config" in given:
        at = given.index("--config")
        given[at : at + 2] = given[at + 1 : at + 2]
    sys.argv[1:] = ["bench", "run", *given]
    run()


if __name__ == "__main__":
    main()
