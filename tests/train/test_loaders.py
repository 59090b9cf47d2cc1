"""Loaders that give more than tensors, and that draw random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier import fit, sweep

(X, Y), _ = networks.digit_vectors(256)


def short(model: nn.Module, data: Any, **settings: Any) -> Any:
    return fit(model, data, **{"epochs": 2, "batch_size": 32, "target": 0.5, "quiet": True} | settings)


class Masked(nn.Module):
    """Reads what is no tensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = networks.mlp(), networks.Shared()

    def forward(self, x: Tensor, mask: Tensor | None, scale: int, name: str) -> Tensor:
        self.seen.append((mask, scale, name))
        return self.inner(x if mask is None else x * mask) * scale


@pytest.mark.parametrize("settings", [{}, {"samples": 2}, {"recipe": "ranked"}])
def test_what_is_no_tensor_in_a_batch_is_handed_on(settings: dict[str, Any]) -> None:
    """As to a model that knows their values. Batches that differ in them are not joined."""
    parts = list(zip(X.split(32), Y.split(32), strict=True))
    batches = [{"x": x, "mask": None, "scale": 2, "name": "a", "labels": y} for x, y in parts]
    model = Masked()
    result = short(model, batches, validation=batches, **settings)

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = networks.mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    expected = short(Doubled(), parts, validation=parts, **settings)
    for ours, theirs in zip(result.model.parameters(), expected.model.parameters(), strict=True):
        assert ours.equal(theirs)
    assert set(model.seen) == {(None, 2, "a")}
    assert result.examples["mask"] is None
    other = Masked()
    mixed = [
        batch | {"name": "ab"[i % 2], "mask": [None, torch.ones(32, 64)][i % 2]} for i, batch in enumerate(batches)
    ]
    short(other, mixed, **settings)
    assert {name for _, _, name in other.seen} == {"a", "b"}
    assert all((mask is None) == (name == "a") for mask, _, name in other.seen)


@pytest.mark.parametrize("how", ["fit", "no length", "sweep"])
def test_data_that_draw_leave_everybody_s_random_numbers_as_they_were(how: str, tmp_path: Path) -> None:
    """As augmentation does; also where the result is shipped."""

    class Augmented:
        def __iter__(self) -> Iterator[Any]:
            for x, y in zip(X[:128].split(32), Y[:128].split(32), strict=True):
                noise = np.random.randn() + random.random() + float(torch.rand(()))  # noqa: NPY002
                yield x + 0.01 * noise, y

    class Counted(Augmented):
        def __len__(self) -> int:
            return 4

    def drawn() -> tuple[float, ...]:
        return float(torch.rand(())), np.random.rand(), random.random()  # noqa: NPY002

    def begin() -> None:
        torch.manual_seed(5)
        np.random.seed(5)  # noqa: NPY002
        random.seed(5)

    model, data = networks.mlp(), Augmented() if how == "no length" else Counted()
    begin()
    expected = drawn()
    begin()
    if how == "sweep":
        result = sweep(lambda: model, data, targets=[0.5], epochs=2, batch_size=32, quiet=True)[0]
    else:
        result = short(model, data, validation=data)
    espalier.ship(result, tmp_path, formats=("torch", "python"))
    assert drawn() == expected
