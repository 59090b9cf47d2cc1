"""Espalier: train a neural network and shape it in the same loop."""

from espalier.compact import load, save
from espalier.cost import Cost, Form
from espalier.gates import Gate, attach, recalibrate
from espalier.search import Search
from espalier.space import (
    BadInput,
    BadMask,
    Bits,
    Choice,
    Corrupt,
    Diverged,
    EspalierError,
    NoGates,
    Space,
    Unreachable,
)

__version__ = "0.1.0"
__all__ = [
    "BadInput",
    "BadMask",
    "Bits",
    "Choice",
    "Corrupt",
    "Cost",
    "Diverged",
    "EspalierError",
    "Form",
    "Gate",
    "NoGates",
    "Search",
    "Space",
    "Unreachable",
    "attach",
    "load",
    "recalibrate",
    "save",
]
