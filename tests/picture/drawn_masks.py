"""Masks of DenseNet-40 to draw, with the counts of connections per block that the paper's table 2 has."""

from __future__ import annotations

import random
from itertools import pairwise

from espalier import picture

LAYERS = 12


def block(count: int, shape: str, layers: int, draw: random.Random) -> set[tuple[int, int]]:
    """Connections (source, reader) of one block, 0 its input and 13 what reads it all; no layer of it is dead.

    shape: "chain", each layer reading the one before, or "wide", each reading the input and read at the end.
    layers: how many of the 12 are alive, drawn at random.
    """
    alive = sorted(draw.sample(range(1, LAYERS + 1), layers))
    line = [0, *alive, LAYERS + 1]
    if shape == "chain":
        chosen = set(pairwise(line))
    else:
        chosen = {(0, layer) for layer in alive} | {(layer, LAYERS + 1) for layer in alive}
    rest = [(a, b) for i, a in enumerate(line) for b in line[i + 1 :] if (a, b) not in chosen]
    return chosen | set(draw.sample(rest, count - len(chosen)))


def mask(*blocks: tuple[int, str, int], seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    kept = set()
    for i, (count, shape, layers) in enumerate(blocks):
        start = i * (LAYERS + 1) + 1
        kept |= {(start + a, start + b) for a, b in block(count, shape, layers, draw)}
    return [int((gate.source, gate.reader) in kept) for gate in picture.connections()]


FULL = [1] * 273
TABLE_2 = {
    "2^-2": mask((36, "chain", 9), (6, "wide", 3), (20, "chain", 8)),
    "2^-4": mask((57, "chain", 12), (39, "wide", 12), (67, "chain", 12)),
    "-2^0": FULL,
}
RANDOM = random.Random(4).choices([0, 1], weights=[58, 42], k=273)  # with dead layers, and gates that lead nowhere
SEVERED = [0] * 273
