"""What is made of the docs: the page of all commands, notebooks of the tutorials, the folder the site is built from.

    python docs/pages.py                     # docs/reference/commands.md and docs/tutorials/*.ipynb, anew
    python docs/pages.py --run               # before that, what the code of the tutorials prints, anew
    python docs/pages.py --gather FOLDER     # the pages of the site, with the files that they lead to

A tutorial is a page of ```python blocks; what one prints is in the ```text block behind it. A notebook has the same
cells with the same outputs.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typer.main

from espalier import files
from espalier.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
# What the site shows, or what its pages lead to.
SHOWN = (
    "*.md", "CITATION.cff", "docs/**/*.md", "docs/**/*.ipynb", "docs/pictures/*", "docs/*.css", "examples/*",
    "results/**/*.md", "results/**/*.svg", "results/**/*.json", "results/**/*.jsonl",
)  # fmt: skip


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(name, command) of every command that does something."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from leaves(inner, (*path, name))
    else:
        yield " ".join(path), command


def default_of(parameter: Any) -> str:
    value = parameter.default() if callable(parameter.default) else parameter.default
    if parameter.required:
        return "required"
    if value is True:
        return "default on"
    told = isinstance(value, (str, int, float, Path)) and value is not False and value != ""
    return f"default `{value}`" if told else ""


def kind_of(command: Any, parameter: Any) -> str:
    """What its value is, in words; nothing for a switch."""
    if parameter.metavar:
        return f"`{parameter.metavar}`"
    hint = str(inspect.signature(command.callback, eval_str=True).parameters[parameter.name].annotation)
    known = (("bool", ""), ("list", "texts"), ("Path", "path"), ("int", "whole number"), ("float", "number"))
    return next((words for name, words in known if name in hint), "text")


def row(command: Any, parameter: Any) -> str:
    """A line of a command's table. A flag is its TOML key too."""
    shown = " / ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    value = ", ".join(words for words in (kind_of(command, parameter), default_of(parameter)) if words)
    cells = (shown, parameter.help or "", value)
    return f"| {' | '.join(' '.join(cell.replace('|', chr(92) + '|').split()) for cell in cells)} |"


def section(name: str, command: Any) -> str:
    about, *examples = re.split(r"\s*Example: ", command.help)
    words = " ".join(about.split())
    code = "\n".join(f"$ {' '.join(example.split())}" for example in examples)
    rows = [row(command, parameter) for parameter in command.params if parameter.name != "help"]
    table = "\n".join(["| setting | what it is | value |", "|---|---|---|", *rows])
    return f"## espalier {name}\n\n{words}\n\n```console\n{code}\n```\n\n{table}\n"


def commands() -> str:
    """The page of all commands, from their one definition."""
    head = """# Commands

<!-- Made by `python docs/pages.py` from the commands themselves; do not edit. -->

Every command with every setting, as `espalier COMMAND --help` has them. A setting is a flag, or a key of a TOML file
under the same name. [The command line](../cli.md) explains how to use them, files of settings and exit codes.
"""
    return "\n".join([head, *(section(name, one) for name, one in leaves(typer.main.get_command(app)))])


def cells(page: str) -> list[dict[str, Any]]:
    """The cells of a tutorial: its prose, and its code with what it prints."""
    parts, found = re.split(r"^(```\w*\n.*?^```\n)", page, flags=re.DOTALL | re.MULTILINE), list[dict[str, Any]]()
    for part in parts:
        body = part.split("\n", 1)[-1].removesuffix("```\n")
        if part.startswith("```python\n"):
            code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines(body)}
            found.append(code)
        elif part.startswith("```text\n") and found and found[-1]["cell_type"] == "code":
            found[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": body.splitlines(keepends=True)}]
        elif part.strip():
            found.append({"cell_type": "markdown", "metadata": {}, "source": lines(part)})
    return [{"id": f"cell-{i}", **cell} for i, cell in enumerate(found)]


def lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


def notebook(page: str) -> str:
    """A tutorial as a Jupyter notebook, format 4.5."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells(page), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def printed(page: str) -> list[str]:
    """What each code cell of a tutorial prints, run from top to bottom in one namespace, in an empty folder.

    By one thread: several add up in another order, and runs then part."""
    names, texts, threads = dict[str, Any](), list[str](), torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.ExitStack() as left:
        left.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        for cell in cells(page):
            if cell["cell_type"] == "code":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile("".join(cell["source"]), "tutorial", "exec"), names)
                texts.append(out.getvalue())
    return texts


def rerun(page: str) -> str:
    """The page with what its code prints now."""
    texts = iter(printed(page))
    block = re.compile(r"(^```python\n.*?^```\n)(?:\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)

    def shown(found: re.Match[str]) -> str:
        text = next(texts)
        return f"{found[1]}\n```text\n{text}```\n" if text else found[1]

    return block.sub(shown, page)


def gather(folder: Path) -> None:
    """Copies of what the site is built from, at their places below an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in (path for pattern in SHOWN for path in sorted(ROOT.glob(pattern))):
        if path.is_file():
            (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.relative_to(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gather", type=Path)
    parser.add_argument("--run", action="store_true")
    given = parser.parse_args()
    if given.gather:
        gather(given.gather)
        return
    files.write(COMMANDS, commands())
    for page in TUTORIALS:
        if given.run:
            files.write(page, rerun(page.read_text(encoding="utf-8")))
        files.write(page.with_suffix(".ipynb"), notebook(page.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
