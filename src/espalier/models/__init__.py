"""The paper's networks, with its gates placed by hand."""

from espalier.models.densenet import DenseNet
from espalier.models.mlp import MLP

__all__ = ["MLP", "DenseNet"]
