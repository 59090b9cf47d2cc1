"""From the bytes of the standard formats to arrays: IDX (MNIST and its like) and the binary records of CIFAR-10.

Nothing is trusted: every length is checked against what the file says of itself, and what is wrong is said.
"""

from __future__ import annotations

import math
import struct

import numpy as np
from numpy.typing import NDArray

from espalier.space import Corrupt

Bytes = NDArray[np.uint8]

RECORD = 1 + 3 * 32 * 32  # CIFAR-10: the label, then the red, green and blue planes


def idx(data: bytes, what: str, dims: int) -> Bytes:
    """The array in an IDX file of unsigned bytes with ``dims`` dimensions; ``what`` names the file in errors.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), "labels", 1).tolist()
    [7, 9]
    """
    head = 4 + 4 * dims
    if len(data) < head:
        raise Corrupt(f"{what}: {len(data)} bytes are too few for an IDX header of {head}: the file is cut short")
    if data[:4] != bytes([0, 0, 8, dims]):
        expected = bytes([0, 0, 8, dims]).hex()
        raise Corrupt(
            f"{what}: starts with {data[:4].hex()}, an IDX file of bytes in {dims} dimensions with {expected}"
        )
    shape = struct.unpack(f">{dims}I", data[4:head])
    count = math.prod(shape)
    if len(data) - head != count:
        verdict = "the file is cut short" if len(data) - head < count else "something follows its end"
        raise Corrupt(f"{what}: holds {len(data) - head} bytes where its header {shape} asks for {count}: {verdict}")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def images_and_labels(
    images: tuple[str, bytes], labels: tuple[str, bytes], shape: tuple[int, int, int], classes: int
) -> tuple[Bytes, Bytes]:
    """An IDX pair, each given as (name for errors, bytes): images ``(n, *shape)`` and their labels ``(n,)``."""
    pixels = idx(images[1], images[0], 3)
    values = idx(labels[1], labels[0], 1)
    if pixels.shape[1:] != shape[1:]:
        rows, columns = pixels.shape[1:]
        raise Corrupt(f"{images[0]}: images of {rows} x {columns}; they are {shape[1]} x {shape[2]} in this set")
    if len(pixels) != len(values):
        raise Corrupt(f"{images[0]}: {len(pixels)} images, but {len(values)} labels in {labels[0]}")
    _check_labels(values, labels[0], classes)
    return pixels.reshape(-1, *shape), values


def records(data: bytes, what: str, classes: int) -> tuple[Bytes, Bytes]:
    """A CIFAR-10 batch: images ``(n, 3, 32, 32)`` and labels ``(n,)``."""
    if len(data) % RECORD:
        raise Corrupt(
            f"{what}: {len(data)} bytes are not whole records of {RECORD}: {len(data) // RECORD} images and "
            f"{len(data) % RECORD} bytes more; the file is cut short or is something else"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, RECORD)
    _check_labels(rows[:, 0], what, classes)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def _check_labels(labels: Bytes, what: str, classes: int) -> None:
    if not len(labels):
        raise Corrupt(f"{what}: holds no examples")
    worst = int(labels.max())
    if worst >= classes:
        first = int(np.argmax(labels >= classes))
        raise Corrupt(f"{what}: example {first} has label {int(labels[first])}; labels are 0 to {classes - 1}")
