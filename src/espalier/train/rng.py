"""Every global random state a training run may draw from: dropout, somebody else's loader, their augmentation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def states(device: torch.device) -> dict[str, Any]:
    """The states of torch (and of the device), NumPy and Python, ready for a checkpoint."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  the global state is what loaders use
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *(float(value) for value in rest)),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: Mapping[str, Any], device: torch.device) -> None:
    """Go on drawing where :func:`states` stood."""
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    kind, keys, position, has_gauss, gauss = found["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), int(position), int(has_gauss), gauss))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from ``seed`` on inside; outside, everything draws on as if nothing had happened."""
    before = states(device)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        restore(before, device)
