"""The paper's networks, with its gates placed by hand, and a small convolutional one."""

from espalier.models.cnn import CNN
from espalier.models.densenet import DenseNet
from espalier.models.mlp import MLP

__all__ = ["CNN", "MLP", "DenseNet"]
