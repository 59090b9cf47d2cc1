"""Training and shaping in one loop: the step, the loop, many runs at once, checkpoints."""

from espalier.train.batched import sweep
from espalier.train.callbacks import Callback, EarlyStopping, Logger, MLflow, TensorBoard, WandB
from espalier.train.checkpoint import Checkpoint, NotSaved
from espalier.train.fit import fit
from espalier.train.loop import OutOfMemory
from espalier.train.optimizer import StructureOptimizer, shape
from espalier.train.recipes import PRESETS, Recipe
from espalier.train.result import Result
from espalier.train.scoring import Score, deterministic, evaluate, stochastic

__all__ = [
    "PRESETS",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "Logger",
    "MLflow",
    "NotSaved",
    "OutOfMemory",
    "Recipe",
    "Result",
    "Score",
    "StructureOptimizer",
    "TensorBoard",
    "WandB",
    "deterministic",
    "evaluate",
    "fit",
    "shape",
    "stochastic",
    "sweep",
]
