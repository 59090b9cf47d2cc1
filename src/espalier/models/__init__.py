"""The paper's networks, with its gates placed by hand, and convolutional ones whose gates are found."""

from espalier.models.convolutional import CNN, VGG, ResNet
from espalier.models.paper_networks import MLP, DenseNet

__all__ = ["CNN", "MLP", "VGG", "DenseNet", "ResNet"]
