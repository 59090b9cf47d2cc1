"""The paper's networks, with its gates placed by hand, and convolutional ones whose gates are found."""

from espalier.models.cnn import CNN
from espalier.models.densenet import DenseNet
from espalier.models.mlp import MLP
from espalier.models.resnet import ResNet
from espalier.models.vgg import VGG

__all__ = ["CNN", "MLP", "VGG", "DenseNet", "ResNet"]
