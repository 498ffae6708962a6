"""`python -m chipfit.cli`."""

from chipfit.cli import main

main()
