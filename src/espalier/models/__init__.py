"""The paper's networks, with its gates placed by hand, and convolutional ones whose gates are found."""

from espalier.models.architectures import CNN, MLP, VGG, DenseNet, ResNet

__all__ = ["CNN", "MLP", "VGG", "DenseNet", "ResNet"]
