"""`espalier data`: which sets are here, getting one, and checking every byte of one."""

from __future__ import annotations

from pathlib import Path

import typer

from espalier.data import available, get, names, verify

data = typer.Typer(
    help="The data sets known by name: list, get, verify.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

FOLDER = typer.Option(None, "--data-dir", help="Where to look first; then ESPALIER_DATA and the cache folder.")


@data.command("list")
def list_sets(data_dir: Path | None = FOLDER) -> None:
    """Which sets are known, and whether they are on this machine.

    Example: espalier data list --data-dir data
    """
    for status in available(data_dir):
        typer.echo(f"{status.name:<14} {status.state:<11} {status.title}\n{'':<26} {status.detail}")


@data.command("get")
def get_set(name: str, data_dir: Path | None = FOLDER) -> None:
    """Have a set on this machine, checked: downloaded where it is missing.

    Example: espalier data get mnist --data-dir data
    """
    status = get(name, data_dir)
    typer.echo(f"{status.name}: {status.state}; {status.detail}")


@data.command("verify")
def verify_sets(
    which: list[str] = typer.Argument(None, help="Sets; default: every one that is here."),
    data_dir: Path | None = FOLDER,
) -> None:
    """Check every byte of sets that are here. Exit code 2 if one is corrupt, or was named and is not usable.

    Example: espalier data verify mnist cifar10 --data-dir data
    """
    bad = False
    for name in which or names():
        status = verify(name, data_dir)
        typer.echo(f"{status.name}: {status.state}; {status.detail}")
        bad |= status.state == "corrupt" or (bool(which) and not status.usable)
    if bad:
        raise typer.Exit(2)
