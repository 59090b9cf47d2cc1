"""The help of every command: an example in it, which parses; every flag explained; and docs/cli.md names them all."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer")
import typer.main

from espalier.cli.app import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def commands(command, path=()):
    """(words, command) of every command that does something."""
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
    else:
        yield path, command


ROOT = typer.main.get_command(app)
ALL = dict(commands(ROOT))


def test_the_commands_are_there():
    assert {("demo",), ("train",), ("compact",), ("report",), ("paper", "unit-selection"), ("data", "get")} <= set(ALL)


def examples(command):
    """The examples of a help text; a line that begins deeper goes on with the one before."""
    text = re.sub(r"\s+", " ", command.help)
    return [found.strip() for found in re.findall(r"Example: (espalier .*?)(?= Example: |$)", text)]


def parse(words):
    """Read a command line as far as its values, without running it."""
    assert words[0] == "espalier"
    command, rest = ROOT, words[1:]
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, rest[0]
        command, rest = command.commands[rest[0]], rest[1:]
    command.make_context("espalier", list(rest))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_has_an_example_that_parses(path, espal):
    found = examples(ALL[path])
    assert found
    for example in found:
        words = shlex.split(example)
        assert tuple(words[1 : 1 + len(path)]) == path
        parse(words)
    assert "Example: espalier" in espal(*path, "--help").out


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_flag_says_what_it_is(path):
    for parameter in ALL[path].params:
        assert getattr(parameter, "help", None), (path, parameter.name)


@pytest.mark.parametrize(
    ("path", "old"),
    [
        (("train",), {"lr": "learning-rate", "preset": "recipe"}),
        (("study",), {"dataset": "data", "preset": "recipe", "widths": "hidden", "at-once": "runs-at-once"}),
        (("paper", "unit-selection"), {"dataset": "data", "at-once": "runs-at-once"}),
        (("paper", "connection-selection"), {"dataset": "data", "at-once": "runs-at-once"}),
    ],
)
def test_flags_have_one_name_everywhere_and_the_old_ones_are_accepted(path, old):
    assert ALL[path].callback.old_names == old
    names = {name for parameter in ALL[path].params for name in parameter.opts}
    assert {f"--{now}" for now in old.values()} <= names
    assert not {f"--{before}" for before in old} & names


def test_an_old_flag_of_a_command_says_so_in_one_line(espal, tmp_path):
    done = espal("study", "--dataset", "letters", "--out", tmp_path / "out")
    assert done.code == 2
    first, second = done.err.splitlines()
    assert first == "espalier: --dataset is now --data; the old name is accepted in this release only"
    assert "letters" in second
    done = espal("train", "--model", "mpl", "--lr", 0.1, "--preset=paper", "--out", tmp_path / "out")
    assert [line.split()[1:5] for line in done.err.splitlines()[:-1]] == [
        ["--lr", "is", "now", "--learning-rate;"],
        ["--preset", "is", "now", "--recipe;"],
    ]


def test_an_example_that_does_not_parse_is_noticed():
    with pytest.raises(Exception, match="epoch"):
        parse(shlex.split("espalier demo --epoch 3"))


def blocks(text):
    return [
        line.removeprefix("$ ")
        for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("$ espalier")
    ]


@pytest.mark.parametrize("page", [PAGE, PAGE.parents[1] / "README.md"], ids=lambda path: path.name)
def test_the_examples_of_the_pages_parse(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.toml").write_text("")
    found = blocks(page.read_text(encoding="utf-8"))
    assert len(found) >= 3
    for words in (shlex.split(example, comments=True) for example in found):
        parse(words)


def test_the_page_has_a_section_for_every_command_and_every_exit_code():
    text = PAGE.read_text(encoding="utf-8")
    headings = re.findall(r"^## `espalier ([a-z -]+)`", text, re.MULTILINE)
    for path in ALL:
        assert any(" ".join(path).startswith(heading) for heading in headings), path
    named = {" ".join(path) for path in ALL} | {path[0] for path in ALL}
    assert set(headings) <= named
    for code in ("0", "2", "130"):
        assert re.search(rf"^\| {code} \|", text, re.MULTILINE)


def test_the_version_and_no_argument_at_all(espal):
    assert espal("--version").out.startswith("espalier 0")
    done = espal()
    assert done.code in (0, 2)  # typer's versions differ
    assert "train" in done.out
    assert "'trian'" in espal("trian").line
