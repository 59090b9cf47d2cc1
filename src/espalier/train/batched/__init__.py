"""Many runs as one batch: a leading dimension of everything, one compiled step, one graph of several updates."""

from espalier.train.batched.batch import Compute
from espalier.train.batched.runs import Run
from espalier.train.batched.sweep import sweep
from espalier.train.descent import SGD, Adam, AdamW, Constant, Cosine, Linear, Steps

__all__ = ["SGD", "Adam", "AdamW", "Compute", "Constant", "Cosine", "Linear", "Run", "Steps", "sweep"]
