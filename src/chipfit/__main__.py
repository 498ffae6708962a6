"""Run the command line by `python -m chipfit`."""

from chipfit.cli import main

main()
