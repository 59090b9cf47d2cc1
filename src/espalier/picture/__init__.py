"""Pictures of networks: what a mask leaves of one, described as a plain dictionary, and drawn as SVG or PNG.

drawing = picture.densenet(mask)
svg = picture.draw(drawing)              # text for a page
picture.save(drawing, "network.svg")     # or .png
"""

from espalier.picture.describe import (
    Drawing,
    connections,
    densenet,
    layers,
    mlp,
    of_run,
    of_space,
    power,
    raised,
    whole_power,
)
from espalier.picture.render import DARK, LIGHT, draw, encoded, figure, save

__all__ = [
    "DARK",
    "LIGHT",
    "Drawing",
    "connections",
    "densenet",
    "draw",
    "encoded",
    "figure",
    "layers",
    "mlp",
    "of_run",
    "of_space",
    "power",
    "raised",
    "save",
    "whole_power",
]
