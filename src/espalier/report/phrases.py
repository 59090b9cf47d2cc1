"""Numbers and facts of runs in words: for hover labels, tables and summaries, and the commands they were made by."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from espalier.report.run_reader import Run
from espalier.report.study_reader import Section, grouped

BESIDES = {"--commit": 1, "--time-limit": 1, "--page": 1, "--reproduction": 1}  # flags and how many words they take
BESIDES |= {"--quiet": 0, "--no-report": 0, "--report": 0, "--json": 0, "--keep-state": 0}
SLICES = ("--methods", "--targets", "--penalties", "--seeds", "--trials", "--first-seed")
FEW = 4  # calls that are still listed one by one


def percent(value: float | None) -> str:
    """Three digits at least, and no more than can be read.

    >>> percent(0.01482), percent(0.1826), percent(1.0), percent(0.00004), percent(None)
    ('1.48%', '18.3%', '100%', '0.004%', '')
    """
    if value is None:
        return ""
    size = abs(100 * value)
    if size == 0 or size >= 99.95:
        return f"{100 * value:.0f}%"
    return f"{100 * value:.1f}%" if size >= 10 else f"{100 * value:.2f}%" if size >= 0.095 else f"{100 * value:.2g}%"


def amount(value: float | None) -> str:
    """A number of any size in four digits.

    >>> amount(0.052279), amount(187500.0), amount(12.5)
    ('0.05228', '187,500', '12.5')
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """
    >>> duration(4.39), duration(0.4), duration(200), duration(8000)
    ('4.4 s', '0.4 s', '3 min 20 s', '2 h 13 min')
    """
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def score(measure: str, value: float | None) -> str:
    return percent(value) if measure == "error" else amount(value)


def kept(run: Run, most: int = 6) -> str:
    """Gates that ship in each group, of how many."""
    parts = [f"{count}" if total is None else f"{count}/{total}" for count, total in run.kept.values()]
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} groups more" if len(parts) > most else "")


def facts(run: Run) -> list[tuple[str, str]]:
    """All that is known of a run, in a few words each."""
    words = [
        ("method", run.called),
        ("setting", run.label),
        ("fold", "" if run.fold is None else str(run.fold)),
        ("seed", "" if run.seed is None else str(run.seed)),
        (f"error, {run.error_of}", percent(run.error)),
        (f"loss, {run.error_of}", amount(run.loss)),
        *((f"{name} kept", percent(share)) for name, share in run.shares.items()),
        ("gates kept", kept(run)),
        ("updates", "" if run.updates is None else f"{run.updates:,}"),
        ("time", duration(run.seconds)),
        ("on", run.machine),
        ("state", run.state),
    ]
    return [(name, value) for name, value in words if value]


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def headline(section: Section) -> str:
    """The one sentence to read: how small a network of the search may be for an error close to its lowest."""
    axis = section.axes[0] if section.axes else ""
    front = section.front(axis, "search") if section.measure else []
    if not front:
        return ""
    measure = section.measure or "error"
    x, best, _ = front[-1]
    if len(section.marks) == 1:
        said = f"{score(measure, best)} ({section.error_of})"
        return f"The {section.middle}{measure} is {said}, at {percent(x)} of the {axis}."
    lowest = f"The lowest {section.middle}{measure} is {score(measure, best)}, at {percent(x)} of the {axis}"
    small, value, _ = next(one for one in front if one[1] <= 1.1 * best)
    if percent(small) == percent(x):
        return f"{lowest}."
    return f"{lowest}; within a tenth of it, at {score(measure, value)}, {percent(small)} of them are enough."


def layer(place: int, name: str) -> str:
    """A group of gates by its place from the input, and by the name of its module where that is a name.

    >>> layer(1, "stem"), layer(2, "3"), layer(1, "layer 1"), layer(3, "block 3")
    ('layer 1 · stem', 'layer 2', 'layer 1', 'block 3')
    """
    if re.fullmatch(r"(layer|block) \d+", name):
        return name
    return f"layer {place}" if name.isdigit() else f"layer {place} · {name}"


def made_by(commands: Iterable[str]) -> list[str]:
    """Lines that tell how runs were made: each distinct command, or the one that many of them are slices of.

    >>> made_by(["espalier study --quiet --seeds 2 --out x", "espalier study --seeds 2 --out x --commit abc"])
    ['espalier study --seeds 2 --out x']
    >>> made_by(f"espalier study --out x --first-seed {k} --seeds 2" for k in range(0, 10, 2))
    ['espalier study --out x   # in 5 calls, which share out --seeds, --first-seed; each run file has its own']
    """
    calls = dict.fromkeys(_without(command, BESIDES) for command in commands if command)
    lines = list[str]()
    for base, slices in grouped(calls, lambda call: _without(call, dict.fromkeys(SLICES, 1))).items():
        if len(slices) <= FEW:
            lines += slices
            continue
        shared = ", ".join(flag for flag in SLICES if any(flag in call.split() for call in slices))
        lines.append(f"{base}   # in {len(slices)} calls, which share out {shared}; each run file has its own")
    return lines


def _without(command: str, flags: dict[str, int]) -> str:
    try:
        words, kept = shlex.split(command), list[str]()
    except ValueError:  # not one of ours
        return command
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if name in flags:
            del words[: 0 if equals else flags[name]]
        else:
            kept.append(word)
    return shlex.join(kept)
