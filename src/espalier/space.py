"""What may be searched: named, ordered groups of bits and choices. The bottom layer; the errors live here too."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "BadInput", "BadMask", "BadMaskType", "BadType", "Bits", "Choice", "Corrupt", "Diverged", "EspalierError", "Group",
    "NoGates", "RankLost", "Space", "Unreachable", "whole_number",
]  # fmt: skip


class EspalierError(Exception):
    """Anything Espalier refuses to do."""


class BadInput(EspalierError, ValueError):
    """An argument that cannot be used; nothing was changed."""


class BadType(BadInput, TypeError):
    """An argument of a type or dtype that cannot be used; nothing was changed."""


class BadMask(BadInput):
    """A mask of the wrong length or with values other than 0 and 1."""


class BadMaskType(BadMask, BadType):
    """A mask of a type or dtype that cannot be used."""


class NoGates(EspalierError, ValueError):
    """A model in which nothing can be gated."""


class Unreachable(EspalierError, ValueError):
    """A target that no structure of the space can meet."""


class Diverged(EspalierError, ArithmeticError):
    """Every loss of an update was infinite or not a number."""


class Corrupt(EspalierError, ValueError):
    """A file that is truncated, altered, or of a format this version does not know."""


class RankLost(EspalierError, RuntimeError):
    """Another process of those that train one run together has ended or hangs."""


def first_line(error: object) -> str:
    """What an error says, in one line; its kind where it says nothing.

    >>> first_line(ValueError("out of range\\nhere")), first_line(AssertionError())
    ('out of range', 'AssertionError')
    """
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise BadType(f"a group's name is a string, not {name!r}")
    if not name:
        raise BadInput("a group's name is empty; give it one, so that reports can say what it is")


def whole_number(value: object, what: str, least: int, hint: str = "") -> int:
    """The value, if it is an integer of at least ``least``. what: its name in errors; hint: how they end."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadType(f"{what} is an integer, not {value!r}")
    if value < least:
        raise BadInput(f"{what} is at least {least}, not {value}{hint}")
    if value >= 1 << 63:
        raise BadInput(f"{what} is {value}, more than torch counts to; use a smaller number")
    return value


@dataclass(frozen=True)
class Bits:
    """``size`` independent bits, of which a structure that ships keeps at least ``least``.

    >>> Bits("fc1", 784, least=1).size
    784
    """

    name: str
    size: int
    least: int = 0

    def __post_init__(self) -> None:
        _check_name(self.name)
        whole_number(self.size, f"the size of bits {self.name!r}", 1)
        whole_number(self.least, f"`least` of bits {self.name!r}", 0)
        if self.least > self.size:
            raise BadInput(f"bits {self.name!r}: least={self.least} exceeds their number {self.size}")


@dataclass(frozen=True)
class Choice:
    """One variable with ``size`` options of which exactly one is taken: ``size`` entries, one of them 1.

    >>> Choice("activation", 3).size
    3
    """

    name: str
    size: int

    def __post_init__(self) -> None:
        _check_name(self.name)
        whole_number(self.size, f"the number of options of choice {self.name!r}", 2)


Group = Bits | Choice
"""What a space is made of."""


class Space:
    """Named groups of bits and choices, laid out one after another in ``d`` entries.

    ``d``: entries of a mask. ``n``: variables, a bit or a choice each counting one.
    ``freedom``: degrees of freedom, a bit counting 1 and a choice of K options K - 1 (the N of ASNG).
    ``bits``, ``choices``: the groups of each kind, with their slices. ``is_bits``: whether there are no choices, the
    common and fast case.

    >>> space = Space([Bits("fc1", 4, least=1), Choice("act", 3)])
    >>> space.d, space.n, space.freedom
    (7, 5, 6)
    >>> space.slices["act"]
    slice(4, 7, None)
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        self.groups: tuple[Group, ...] = tuple(groups)
        if not self.groups:
            raise BadInput("the space is empty; give at least one Bits or Choice")
        self.slices: dict[str, slice] = {}
        start = 0
        for group in self.groups:
            if not isinstance(group, (Bits, Choice)):
                raise BadType(f"a space holds Bits and Choice, not {group!r}")
            if group.name in self.slices:
                raise BadInput(f"two groups are named {group.name!r}; names tell them apart")
            self.slices[group.name] = slice(start, start + group.size)
            start += group.size
        self.bits = [(g, self.slices[g.name]) for g in self.groups if isinstance(g, Bits)]
        self.choices = [(g, self.slices[g.name]) for g in self.groups if isinstance(g, Choice)]
        self.is_bits = not self.choices
        self.d = start
        self.n = sum(g.size for g, _ in self.bits) + len(self.choices)
        self.freedom = self.d - len(self.choices)

    @classmethod
    def of(cls, space: int | Space) -> Space:
        """A space as it is, or that many bits in one group named ``bits``."""
        if isinstance(space, Space):
            return space
        if not isinstance(space, int) or isinstance(space, bool):
            raise BadType(f"space is a number of bits or an espalier.Space, not {space!r}")
        if space < 1:
            raise BadInput(f"the space is empty: {space} bits; give at least one")
        return cls([Bits("bits", space)])

    def to_json(self) -> str:
        """The layout as canonical JSON: two spaces are equal when these are."""
        rows = [
            ["bits", g.name, g.size, g.least] if isinstance(g, Bits) else ["choice", g.name, g.size]
            for g in self.groups
        ]
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Space:
        return cls(
            Bits(row[1], row[2], row[3]) if row[0] == "bits" else Choice(row[1], row[2]) for row in json.loads(text)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self.groups == other.groups

    def __hash__(self) -> int:
        return hash(self.groups)

    def __repr__(self) -> str:
        return f"Space({list(self.groups)!r})"

    def check_mask(self, mask: Tensor) -> None:
        """Refuse what is not a 0/1 tensor ``(*, d)`` with exactly one option open in every choice."""
        self.check_mask_form(mask)
        bits = (mask != 0).to(mask.dtype)
        if not torch.equal(bits, mask):
            raise BadMask(f"a mask holds 0 and 1 only, not {mask[bits != mask][0].item()!r}")
        for group, where in self.choices:
            taken = mask[..., where].sum(-1)
            if bool((taken != 1).any()):
                raise BadMask(f"choice {group.name!r} takes exactly one option, not {int(taken[taken != 1][0])}")

    def check_mask_form(self, mask: Tensor) -> None:
        """The checks that need no look at the values: type, dtype and length."""
        if not isinstance(mask, Tensor):
            raise BadMaskType(f"a mask is a tensor, not {type(mask).__name__}")
        if not mask.is_floating_point():
            raise BadMaskType(f"a mask is a floating-point tensor of 0 and 1, not {mask.dtype}; use mask.float()")
        if mask.ndim < 1 or mask.shape[-1] != self.d:
            raise BadMask(f"a mask of this space ends in {self.d} entries, not in shape {tuple(mask.shape)}")
