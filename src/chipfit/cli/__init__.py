"""The command line; `chipfit` and `python -m chipfit` start it."""


def main() -> None:
    """Run the command line."""
    from chipfit.cli.app import main as run

    run()
