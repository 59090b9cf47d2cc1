"""How long networks take on this machine: medians of turns that they take one after the other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import nn

from espalier.train import nested


@torch.no_grad()
def milliseconds(
    models: Mapping[str, nn.Module], inputs: Any, seconds: float = 0.5, turns: int = 200
) -> dict[str, float]:
    """The median time of one forward pass of each, on the same inputs. In turns, so that a busy moment of the machine
    hits all of them; at most so many turns, and about so many seconds."""
    for model in models.values():
        for _ in range(3):  # the first calls fill caches
            nested.call(model, inputs)
    times: dict[str, list[float]] = {name: [] for name in models}
    end = time.perf_counter() + seconds
    for turn in range(turns):
        for name, model in models.items():
            began = time.perf_counter()
            nested.call(model, inputs)
            times[name].append(1e3 * (time.perf_counter() - began))
        if turn >= 10 and time.perf_counter() > end:
            break
    return {name: median(found) for name, found in times.items()}
