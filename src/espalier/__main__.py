"""`python -m espalier`: the command line where the script is not on the path."""

from espalier.cli import main

main()
