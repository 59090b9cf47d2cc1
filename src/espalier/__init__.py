"""Espalier: train a neural network and shape it in the same loop."""

from espalier.compact import load, save
from espalier.cost import Cost, Form
from espalier.gates import Gate, Mixed, attach, recalibrate
from espalier.search import Search
from espalier.ship import ship
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
from espalier.train import Callback, StructureOptimizer, fit, shape, sweep

__version__ = "0.2.0"
__all__ = [
    "BadInput",
    "BadMask",
    "Bits",
    "Callback",
    "Choice",
    "Corrupt",
    "Cost",
    "Diverged",
    "EspalierError",
    "Form",
    "Gate",
    "Mixed",
    "NoGates",
    "Search",
    "Space",
    "StructureOptimizer",
    "Unreachable",
    "attach",
    "fit",
    "load",
    "recalibrate",
    "save",
    "shape",
    "ship",
    "sweep",
]
