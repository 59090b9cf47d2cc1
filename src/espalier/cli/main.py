"""The entry point: one clear line and exit code 2 on bad input, 130 on Ctrl-C."""

from __future__ import annotations

import sys

from espalier.space import EspalierError


def main() -> None:
    try:
        from espalier.cli.app import app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("espalier"):
            raise
        sys.exit(f"espalier: the command line needs {missing.name}: pip install 'espalier[cli]'")
    try:
        app()
    except EspalierError as error:
        print(f"espalier: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("espalier: stopped", file=sys.stderr)
        sys.exit(130)
