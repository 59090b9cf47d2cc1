"""The commands, one file each."""

from __future__ import annotations

import typer

from espalier import __version__
from espalier.cli.compact import compact
from espalier.cli.data import data
from espalier.cli.demo import demo
from espalier.cli.paper import paper
from espalier.cli.report import report
from espalier.cli.study import study
from espalier.cli.train import train

app = typer.Typer(
    name="espalier",
    help="Train a neural network and shape it in the same loop: a plain, smaller network at the size you ask for.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo)
app.command()(train)
app.command()(compact)
app.command()(report)
app.command()(study)
app.add_typer(paper, name="paper")
app.add_typer(data, name="data")


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"espalier {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass
