"""The command line, and its entry point: one clear line and exit code 2 on bad input, 130 on Ctrl-C (docs/cli.md has
the codes). argv lives here alone."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import NoReturn

from espalier.space import EspalierError, RankLost

__all__ = ["main"]
BAD_INPUT, LOST, INTERRUPTED = 2, 75, 130
TRACEBACK = "--traceback"  # of every command: where an error came from, before its line


def main() -> None:
    shown = TRACEBACK in sys.argv[1:]
    if shown:
        sys.argv = [word for word in sys.argv if word != TRACEBACK]
    try:
        from espalier.cli.app import app
    except KeyboardInterrupt:
        _end("stopped", INTERRUPTED)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("espalier"):
            raise
        sys.exit(f"espalier: the command line needs {missing.name}: pip install 'espalier[cli]'")
    try:
        code = app(prog_name="espalier", standalone_mode=False)  # so that errors come here, and not in three lines
    except EspalierError as error:
        if shown:
            traceback.print_exception(error)
        code = LOST if isinstance(error, RankLost) else BAD_INPUT
        _end(error.strerror if isinstance(error, OSError) and error.strerror else error, code)
    except KeyboardInterrupt:
        _end("stopped", INTERRUPTED)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        why, where = error.strerror or str(error) or type(error).__name__, error.filename
        more = "; what was saved before is intact, make room and run the same command again"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        _end(f"{f'{where}: ' if where else ''}{why}{more if full else ''}")
    except Exception as error:
        if type(error).__name__ == "Abort":  # what older versions make of Ctrl-C
            _end("stopped", INTERRUPTED)
        if not hasattr(error, "format_message"):  # click's own; which of two copies of it depends on typer's version
            raise
        _usage(error)
    sys.exit(code if isinstance(code, int) else 0)


def _end(why: object, code: int = BAD_INPUT) -> NoReturn:
    print(f"espalier: {' '.join(str(why).split())}", file=sys.stderr)
    if code == LOST:  # torch would wait for the rank once more
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _usage(error: Exception) -> NoReturn:
    """A flag that does not exist, a value that a flag does not take; without any argument, the help."""
    text = str(error.format_message())  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        print(text)
        sys.exit(BAD_INPUT)
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "espalier"
    end = "" if text.endswith((".", "?")) else "."
    _end(f"{text}{end} See `{command} --help`")
