"""Theta over time, read back: from the snapshots of a run directory, or from the histograms of a run file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Theta:
    """Theta over time, gates grouped. values: ``(snapshots, d)`` in [0, 1]; sizes: gates of each group, d in all.

    ranked: a row is a rank, not a gate: at each update the gates of a group stand in order of their theta.
    """

    updates: list[int]
    values: np.ndarray
    sizes: dict[str, int]
    ranked: bool


def from_tensors(path: Path, space: Any) -> Theta | None:
    """``theta.safetensors`` of a run directory; space: its groups of gates, as JSON. None where they do not fit."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
        values, updates = tensors["theta"], tensors["updates"]
        sizes = {str(row[1]): int(row[2]) for row in json.loads(space)}
    except (OSError, KeyError, IndexError, TypeError, ValueError, SafetensorError):
        return None
    if values.ndim != 2 or not values.size or values.shape != (len(updates), sum(sizes.values())):
        return None
    return Theta([int(u) for u in updates], np.clip(np.nan_to_num(values), 0, 1), sizes, ranked=False)


def from_histograms(curve: Sequence[Any], names: Sequence[str]) -> Theta | None:
    """Ranks, from counts of theta in equal bins: the k-th smallest theta of a group, as the middle of its bin."""
    rows = [row for row in curve if isinstance(row, Mapping) and row.get("theta_histogram")]
    try:
        counts = np.array([row["theta_histogram"] for row in rows], dtype=np.int64)  # (snapshots, groups, bins)
        updates = [int(row["update"]) for row in rows]
    except (KeyError, TypeError, ValueError):
        return None
    if counts.ndim != 3 or counts.shape[1] != len(names) or (counts.sum(2) != counts[0].sum(1)).any():
        return None
    middles = (np.arange(counts.shape[2]) + 0.5) / counts.shape[2]
    values = np.array([np.concatenate([np.repeat(middles, bins) for bins in groups]) for groups in counts])
    return Theta(updates, values, dict(zip(names, map(int, counts[0].sum(1)))), ranked=True)
