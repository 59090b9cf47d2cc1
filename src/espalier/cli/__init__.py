"""The command line. argv lives here alone."""

from espalier.cli.main import main

__all__ = ["main"]
