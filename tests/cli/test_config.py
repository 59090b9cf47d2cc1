"""Settings from a TOML file: beneath the flags, refused by name, and written so that they repeat a call."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from espalier.cli.command import register  # noqa: E402
from espalier.space import BadInput  # noqa: E402
from espalier.train.setting import check, setting  # noqa: E402

CALLS: list[dict[str, object]] = []
app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)


def grow(
    out: Annotated[Path, typer.Option()],
    batch_size: int = typer.Option(3, min=1),
    rate: float | None = typer.Option(None, "--lr"),
    targets: str = typer.Option("0.5"),
    argument: Annotated[list[str] | None, typer.Option("--model-arg")] = None,
    report: bool = typer.Option(True),
    quiet: bool = typer.Option(False, "--quiet"),
) -> None:
    """Grow."""
    CALLS.append(dict(locals()))


def cut(run: Path, to: Annotated[Path, typer.Option()]) -> None:
    """Cut."""
    CALLS.append(dict(locals()))


register(app, grow)
register(app, cut)


def call(*words):
    CALLS.clear()
    done = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(done.exception, BadInput):
        raise done.exception
    assert done.exit_code == 0, done.output
    (settings,) = CALLS
    return settings


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "config.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


FULL = """
out = "runs/a"
batch-size = 8
lr = 1
targets = [0.1, 0.25]
report = false
[model_arg]
width = 64
hidden = [4, 4]
name = "x"
"""


def test_a_file_gives_settings_and_flags_override_it(file):
    path = file(FULL)
    settings = call("grow", path)
    assert settings == {
        "out": Path("runs/a"),
        "batch_size": 8,
        "rate": 1.0,
        "targets": "0.1,0.25",
        "argument": ["width=64", "hidden=[4, 4]", 'name="x"'],
        "report": False,
        "quiet": False,
    }
    assert isinstance(settings["rate"], float)
    over = call("grow", path, "--batch-size", 5, "--report", "--out", "b")
    assert over == settings | {"batch_size": 5, "report": True, "out": Path("b")}
    assert call("grow", "--quiet", path)["quiet"] is True


def test_underscores_and_dashes_are_the_same_name_but_not_both(file):
    assert call("grow", file('out = "a"\nbatch_size = 4'))["batch_size"] == 4
    with pytest.raises(BadInput, match="twice"):
        call("grow", file('out = "a"\nbatch_size = 4\nbatch-size = 4'))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batchsize = 3", ["'batchsize'", "'batch-size'"]),
        ("zzz = 3", ["'zzz'", "batch-size", "targets"]),
        ("batch-size = 0", ["batch-size = 0", "1"]),
        ("batch-size = 2.5", ["batch-size = 2.5", "whole number"]),
        ("batch-size = true", ["batch-size = true", "whole number"]),
        ('batch-size = "8"', ['"8"', "whole number"]),
        ('lr = "fast"', ["lr", '"fast"', "a number"]),
        ("report = 1", ["report = 1", "true or false"]),
        ("out = 3", ["out = 3", "path"]),
        ("targets = [[1]]", ["targets", "text"]),
        ("model-arg = 3", ["model-arg = 3", "list"]),
        ("batch-size = [", ["not TOML"]),
        ("save-config = 'x'", ["save-config"]),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_what_is_allowed(file, text, said):
    with pytest.raises(BadInput) as caught:
        call("grow", file(text))
    assert "config.toml" in str(caught.value)
    for part in said:
        assert part in str(caught.value)
    assert not CALLS


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(BadInput, match=r"no file .*nowhere.toml"):
        call("grow", tmp_path / "nowhere.toml")
    with pytest.raises(BadInput, match="cannot be read"):
        call("grow", tmp_path)


def test_a_saved_file_repeats_the_call(file, tmp_path):
    saved = tmp_path / "deep" / "saved.toml"
    first = call("grow", file(FULL), "--targets", 'a"\\é,2^-6', "--lr", "1e-5", "--save-config", saved)
    assert call("grow", saved) == first
    table = tomllib.loads(saved.read_text(encoding="utf-8"))
    assert table["batch-size"] == 8
    assert table["quiet"] is False  # a default may change
    assert not {"config", "save-config", "help"} & table.keys()
    again = call("grow", saved, "--save-config", saved, "--quiet")  # its own file may be replaced
    assert call("grow", saved) == again == first | {"quiet": True}


def test_settings_that_are_not_set_are_not_written(tmp_path):
    call("grow", "--out", "a", "--save-config", tmp_path / "s.toml")
    assert "lr" not in tomllib.loads((tmp_path / "s.toml").read_text())


def test_somebody_elses_file_is_not_overwritten(tmp_path):
    notes = tmp_path / "pyproject.toml"
    notes.write_text("[project]\n")
    with pytest.raises(BadInput, match="overwritten"):
        call("grow", "--out", "a", "--save-config", notes)
    assert notes.read_text() == "[project]\n"
    assert not CALLS


def test_a_command_with_arguments_of_its_own_has_an_option(file, tmp_path):
    path = file('to = "small"')
    assert call("cut", "r", "--config", path) == {"run": Path("r"), "to": Path("small")}
    assert call("cut", "r", "--config", path, "--to", "b")["to"] == Path("b")
    call("cut", "r", "--to", "b", "--save-config", tmp_path / "s.toml")
    assert call("cut", "--config", tmp_path / "s.toml") == {"run": Path("r"), "to": Path("b")}
    assert "--config s.toml" in (tmp_path / "s.toml").read_text()


@dataclass(frozen=True)
class Pot:
    """Settings of a command, as a study has them."""

    soil: str = setting(help="What it grows in.", flag="ground", old="dirt", choices=("sand", "clay"))
    width: int = setting(3, "Of the pot.", least=1)
    heights: tuple[float, ...] = setting((2**-6, 0.5), "Of the plants.", after="soil")
    leaves: tuple[int, ...] | None = setting(None, "How many.")
    light: str = setting("dim", "Of the lamp.", on_cuda="bright")
    water: bool = setting(True, "Every day.")
    wild: bool = setting(False, "Without a hedge.")
    names: tuple[str, ...] = setting((), "Of the plants.", repeated=True, flag="name")
    note: Path | None = None  # no setting of the command

    def __post_init__(self) -> None:
        check(self)


def plant(*, out: Annotated[Path, typer.Option()], pot: Pot, device: str = "cpu") -> None:
    """Plant."""
    CALLS.append(dict(locals()))


register(app, plant)
NEEDED = ("plant", "--out", "a", "--ground", "clay")


def test_a_settings_class_is_a_flag_of_each_field():
    assert call(*NEEDED) == {"out": Path("a"), "pot": Pot("clay"), "device": "cpu"}
    words = ("--width", 5, "--heights", "2^-2,1", "--leaves", "3,4", "--light", "soft", "--no-water", "--wild")
    pot = Pot("clay", 5, (0.25, 1.0), (3, 4), "soft", False, True, ("a", "b"))
    assert call(*NEEDED, *words, "--name", "a", "--name", "b")["pot"] == pot
    assert call(*NEEDED, "--device", "cuda:1")["pot"].light == "bright"
    text = CliRunner().invoke(app, ["plant", "--help"]).output
    assert text.index("--ground") < text.index("--heights") < text.index("--width")
    assert "2^-6,0.5" in text
    assert "--no-water" in text
    assert "--no-wild" not in text
    assert "--note" not in text


def test_settings_of_a_class_from_a_file_and_back(file, tmp_path):
    path = file('out = "a"\nground = "sand"\nheights = [0.5, 1]\nleaves = [2]\nname = ["x"]\nwild = true')
    first = call("plant", path, "--width", 4, "--save-config", tmp_path / "s.toml")
    assert first["pot"] == Pot("sand", 4, (0.5, 1.0), (2,), wild=True, names=("x",))
    assert call("plant", tmp_path / "s.toml") == first


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--width", 0), "--width is at least 1, not 0"),
        (("--ground", "send"), "--ground is 'sand' or 'clay', not 'send'; did you mean 'sand'?"),
        (("--heights", "2^-6,tall"), "'tall' is not a number"),
    ],
)
def test_a_bad_setting_is_refused_by_the_name_of_its_flag(words, said, tmp_path, file):
    with pytest.raises(BadInput, match=re.escape(said)):
        call(*NEEDED, *words, "--save-config", tmp_path / "s.toml")
    assert not (tmp_path / "s.toml").exists()
    key, value = words[0].removeprefix("--"), json.dumps(words[1])
    with pytest.raises(BadInput, match=re.escape(f"config.toml: {key} = {value}: {said}")):
        call("plant", file(f"{key} = {value}"))


def test_an_old_name_is_accepted_with_one_line_of_warning(file):
    for words in (("--dirt", "sand"), ("--dirt=sand",)):
        done = CliRunner().invoke(app, ["plant", "--out", "a", *words])
        assert done.exit_code == 0
        assert CALLS.pop()["pot"].soil == "sand"
        assert done.stderr == "espalier: --dirt is now --ground; the old name is accepted in this release only\n"
    path = file('out = "a"\ndirt = "sand"')
    done = CliRunner().invoke(app, ["plant", str(path)])
    assert CALLS.pop()["pot"].soil == "sand"
    assert done.stderr == f"espalier: {path}: dirt is now ground; the old name is accepted in this release only\n"
    with pytest.raises(BadInput, match="twice"):
        call("plant", file('dirt = "sand"\nground = "sand"'))
    assert "dirt" not in CliRunner().invoke(app, ["plant", "--help"]).output


def test_help_names_the_file():
    assert "CONFIG" in CliRunner().invoke(app, ["grow", "--help"]).output
    assert "--config" in CliRunner().invoke(app, ["cut", "--help"]).output
