"""A function as a command: its flags from its parameters and from settings classes, and all of them from a TOML file.

:func:`register` is all a command needs. A parameter whose type is a dataclass of settings
(:mod:`espalier.train.setting`) stands for a flag of each of them, and is given the settings that the flags say. The
TOML file is the command's first argument (`espalier train config.toml`), or the option ``--config`` where the command
has arguments of its own; flags override it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import re
import shlex
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from typer.models import ArgumentInfo

from espalier.space import BadInput
from espalier.train.checkpoint import write
from espalier.train.setting import Setting, declared, usual_device

FIRST = "# espalier "  # a saved file begins with the command it is of, and only such files are overwritten
OURS = ("config", "save_config")
OLD = "old_names"  # the attribute of a command that holds the names its flags had, and what they are now

Kind = tuple[Any, Callable[[Any], Any], str]  # what a TOML value may be, as its flag, in words
KINDS: dict[Any, Kind] = {  # of settings, by their type
    bool: (bool, bool, "true or false"),
    int: (int, int, "a whole number"),
    float: ((int, float), float, "a number"),
    str: ((str, int, float), str, "text"),
    Path: (str, str, "a path, as text"),
}

DataDir = Annotated[Path | None, typer.Option(help="Where the data sets are.")]
TimeLimit = Annotated[float | None, typer.Option(help="Stop cleanly after so many seconds; exit code 0, unfinished.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


def command_line(words: Sequence[str] | None = None) -> str:
    """The command as run files have it: without the folders of the machine it ran on.

    >>> command_line(["paper", "unit-selection", "--out=/home/me/results/units", "--data-dir", "/data/sets"])
    'espalier paper unit-selection --out=units --data-dir sets'
    """
    words = sys.argv[1:] if words is None else words
    return shlex.join(["espalier", *[re.sub(r"(?<![^=])/\S*/([^/]*)", r"\1", word) for word in words]])


class Command(typer.core.TyperCommand):
    """A command whose flags are also known by the names they had, with a warning."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        old, words = getattr(self.callback, OLD), list[str]()
        own = [one for one in self.params if one.name not in (*OURS, "help")]
        folders = {flag for one in own if _kind(self.callback, str(one.name)) is Path for flag in one.opts}
        for word, following in zip(args, [*args[1:], "-"]):
            name, equals, value = word.partition("=")
            if name in folders and not (value if equals else following):
                raise BadInput(f"{name} is a path, not an empty word; use . for the current folder")
            now = old.get(name[2:]) if name.startswith("--") else None
            if now is not None:
                _warn(name, f"--{now}")
            words.append(word if now is None else f"--{now}{equals}{value}")
        return super().parse_args(ctx, words)


def register(app: typer.Typer, function: Callable[..., Any], name: str | None = None) -> None:
    """Make a command of a function: flags, a TOML file beneath them, and ``--save-config`` that writes one."""
    hints = typing.get_type_hints(function, include_extras=True)
    own = inspect.signature(function).parameters
    kind = inspect.Parameter.KEYWORD_ONLY
    groups = dict[str, tuple[type[Any], list[Setting]]]()
    given = list[inspect.Parameter]()
    for parameter in own.values():
        hint = hints.get(parameter.name, str)
        if is_dataclass(hint) and isinstance(hint, type):
            settings = [one for one in declared(hint) if one.name not in own]
            groups[parameter.name] = hint, settings
            given += [_flag(one) for one in settings]
        else:
            given.append(parameter.replace(kind=kind, annotation=hint))
    about = "A TOML file of the settings below, by their names; flags override it."
    config: Any = typer.Argument(None, metavar="CONFIG", help=about, is_eager=True, callback=_read)
    if any(_positional(p) for p in given):
        config = typer.Option(None, "--config", metavar="FILE", help=about, is_eager=True, callback=_read)
    saving: Any = typer.Option(None, "--save-config", metavar="FILE", help="Write the settings of this call as TOML.")
    ours = [inspect.Parameter(n, kind, default=d, annotation=Path | None) for n, d in zip(OURS, (config, saving))]
    context = inspect.Parameter("called", kind, annotation=typer.Context)

    @functools.wraps(function)
    def configured(*, called: typer.Context, config: Path | None, save_config: Path | None, **flags: Any) -> Any:
        cuda = bool(groups) and usual_device(flags.get("device") or "").startswith("cuda")
        values = {one: value for one, value in flags.items() if one in own}
        for group, (settings_class, settings) in groups.items():
            values[group] = settings_class(**{one.name: one.parse(flags[one.name], cuda) for one in settings})
        if save_config is not None:
            _write(save_config, called, flags)
        return function(**values)

    del configured.__wrapped__  # typer would look at the signature of what is inside
    parameters = [context, ours[0], *given, ours[1]]
    configured.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    configured.__annotations__ = {p.name: p.annotation for p in parameters}
    setattr(configured, OLD, {one.old: one.flag for _, settings in groups.values() for one in settings if one.old})
    app.command(name, cls=Command)(configured)


def _flag(setting: Setting) -> inspect.Parameter:
    """The option of a setting; its values are read and checked as soon as it is given."""
    name = f"--{setting.flag}"
    switch = setting.type is bool and setting.default is not False
    default = ... if setting.required else setting.flag_default

    def checked(value: Any) -> Any:
        setting.check(setting.parse(value), name)
        return value

    option: Any = typer.Option(
        default,
        f"{name}/--no-{setting.flag}" if switch else name,
        help=setting.help,
        metavar=setting.metavar,
        callback=checked,
    )
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=setting.flag_type)


def _warn(old: str, now: str) -> None:
    typer.echo(f"espalier: {old} is now {now}; the old name is accepted in this release only", err=True)


def _positional(parameter: inspect.Parameter) -> bool:
    """Whether typer makes an argument of it, not an option."""
    infos = [*getattr(parameter.annotation, "__metadata__", ()), parameter.default]
    plain = len(infos) == 1 and parameter.default is parameter.empty
    return plain or any(isinstance(one, ArgumentInfo) for one in infos)


def _read(ctx: typer.Context, value: Path | None) -> Path | None:
    """Beneath the flags: what the command line does not say is looked up here."""
    if value is not None and not ctx.resilient_parsing:
        ctx.default_map = {**(ctx.default_map or {}), **_settings(value, ctx)}
    return value


def _settings(path: Path, ctx: typer.Context) -> dict[str, Any]:
    """The file's values by the names of the command's parameters, each checked as its flag would be."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(
            f"there is no file {path}; settings are flags, or a TOML file such as --save-config writes"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from None
    known = {_key(parameter): parameter for parameter in _parameters(ctx)}
    old = getattr(ctx.command.callback, OLD)
    settings = dict[str, Any]()
    for key, value in table.items():
        name = key.replace("_", "-")
        if name in old:
            _warn(f"{path}: {key}", old[name])
        parameter = known.get(old.get(name, name))
        if parameter is None:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
            raise BadInput(f"{path}: {ctx.command_path} has no setting {key!r}; {hint}")
        if parameter.name in settings:
            raise BadInput(f"{path}: {key} is there twice, by two spellings of its name")
        kind = _kind(ctx.command.callback, parameter.name)
        read = _as_flag(value, kind)
        if read is None:
            *_, wanted = KINDS.get(kind, ["a list of texts, or a table"])
            raise BadInput(f"{path}: {key} = {_shown(value)}: {key} is {wanted}")
        try:
            parameter.process_value(ctx, read)
        except BadInput as error:
            raise BadInput(f"{path}: {key} = {_shown(value)}: {error}") from None
        except Exception as error:  # click's own, which of two copies of it depends on typer's version
            if not hasattr(error, "format_message"):
                raise
            why = getattr(error, "message", "") or error.format_message()
            raise BadInput(f"{path}: {key} = {_shown(value)}: {why}") from None
        settings[parameter.name] = read
    return settings


def _as_flag(value: Any, kind: Any) -> Any:
    """A TOML value as its flag would be given; None where it is of another type.

    Text takes numbers too, and a list as words with commas between. Repeated text takes a table, as KEY=VALUE.
    """
    words = [str(item) for item in value] if isinstance(value, list) and all(map(_scalar, value)) else None
    if kind is list or typing.get_origin(kind) is list:
        return [f"{key}={json.dumps(item)}" for key, item in value.items()] if isinstance(value, dict) else words
    if kind is str and words is not None:
        return ",".join(words)
    types_of, read, _ = KINDS.get(kind, KINDS[Path])
    return read(value) if isinstance(value, types_of) and isinstance(value, bool) == (kind is bool) else None


def _kind(command: Any, name: str) -> Any:
    """The type of a setting, without the None of an optional one."""
    kind = inspect.signature(command, eval_str=True).parameters[name].annotation
    kind = typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    return kind


def _scalar(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _write(path: Path, ctx: typer.Context, settings: Mapping[str, Any]) -> None:
    """What reproduces the call: every setting that has a value, the defaults too, since they may change."""
    try:
        there = path.read_text(encoding="utf-8") if path.exists() else FIRST
    except (OSError, UnicodeDecodeError):
        there = ""
    if not there.startswith(FIRST):
        raise BadInput(f"{path} is not a file that --save-config wrote, and would be overwritten; name another")
    first = ctx.command.params[0]
    option = "" if first.name == "config" and not first.opts[0].startswith("-") else "--config "
    lines = [f"{FIRST}{ctx.command_path.partition(' ')[2]}: {ctx.command_path} {option}{path.name} repeats this call"]
    for parameter in _parameters(ctx):
        value = settings.get(parameter.name)
        if value is not None and value not in ((), []):
            lines.append(f"{_key(parameter)} = {_toml(value)}")
    write(path, ("\n".join(lines) + "\n").encode())
    typer.echo(f"wrote {path}", err=True)


def _parameters(ctx: typer.Context) -> list[Any]:
    return [p for p in ctx.command.params if p.name not in (*OURS, "help")]


def _key(parameter: Any) -> str:
    """A setting is named as its flag is, an argument as it is called."""
    flags = [option for option in parameter.opts if option.startswith("--")]
    name: str = max(flags, key=len).removeprefix("--") if flags else parameter.name
    return name.replace("_", "-")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return json.dumps(str(getattr(value, "value", value)), ensure_ascii=False).replace("\x7f", "\\u007f")


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)
