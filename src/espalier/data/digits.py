"""The embedded set: 1,797 handwritten digits of 8 x 8, in the package, so that nothing need be downloaded.

These are scikit-learn's digits, the test part of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten
Digits" (UCI, CC BY 4.0). ``digits.npz`` holds `load_digits().images` and `.target` as unsigned bytes, compressed.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import replace
from functools import cache
from importlib.resources import files

import numpy as np
import torch

from espalier.data.dataset import Dataset, from_arrays, held_out
from espalier.space import Corrupt

COUNT, LEVELS = 1797, 16  # images; the darkest pixel
TEST, SPLIT_SEED = 450, 0  # a quarter is held out, by class, always the same quarter


@cache
def _arrays() -> tuple[np.ndarray, np.ndarray]:
    """Images ``(1797, 1, 8, 8)`` and labels ``(1797,)``, uint8."""
    source = files("espalier.data") / "digits.npz"
    try:
        with np.load(io.BytesIO(source.read_bytes()), allow_pickle=False) as stored:
            images, labels = stored["images"], stored["labels"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Corrupt(f"{source} cannot be read ({error}); install espalier again") from error
    if images.shape != (COUNT, 8, 8) or labels.shape != (COUNT,) or images.max() != LEVELS or labels.max() != 9:
        raise Corrupt(f"{source} does not hold the {COUNT} digits; install espalier again")
    return images[:, None], labels


def digits() -> Dataset:
    """1,347 training and 450 test images ``(1, 8, 8)``, pixels from 0 to 16, read as 0 to 1."""
    images, labels = _arrays()
    train, test = held_out(labels.astype(np.int64), TEST, SPLIT_SEED)
    data = from_arrays(
        (images[train], labels[train].astype(np.int64)),
        (images[test], labels[test].astype(np.int64)),
        name="digits",
        classes=tuple("0123456789"),
        scale=1 / LEVELS,
    )
    return replace(data, standard=True)


def all_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """All 1,797 images ``(1797, 1, 8, 8)`` uint8 in their stored order, and labels ``(1797,)`` int64: for folds."""
    images, labels = _arrays()
    return torch.tensor(images), torch.tensor(labels, dtype=torch.int64)
