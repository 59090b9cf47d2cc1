"""Bits and choices: what may be searched. The bottom layer; the errors live here too."""

from espalier.space.errors import (
    BadInput,
    BadMask,
    BadMaskType,
    BadType,
    Corrupt,
    Diverged,
    EspalierError,
    NoGates,
    RankLost,
    Unreachable,
)
from espalier.space.space import Bits, Choice, Group, Space, whole_number

__all__ = [
    "BadInput",
    "BadMask",
    "BadMaskType",
    "BadType",
    "Bits",
    "Choice",
    "Corrupt",
    "Diverged",
    "EspalierError",
    "Group",
    "NoGates",
    "RankLost",
    "Space",
    "Unreachable",
    "whole_number",
]
