"""Connection selection small enough for a test: three blocks of two layers, images of 8 x 8, a few updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from espalier.data import Dataset, from_arrays
from espalier.study import PaperStudy
from espalier.study.settings import ConnectionSettings
from espalier.train.batched import Compute
from espalier.train.loop import Stop
from espalier.train.progress import Progress

TINY: dict[str, Any] = {
    "layers": 2, "growth": 4, "batch_size": 4, "epochs": 1, "trials": 1, "penalties": (0.25, -0.5), "shares": (0.6,),
    "points": 2, "pad": 1, "theta_rate": 0.1,
}  # fmt: skip


def images(train: int = 48, test: int = 20, side: int = 8) -> Dataset:
    """Ten classes that differ in colour and pattern, uint8 as the real ones are."""
    draw = torch.Generator().manual_seed(5)
    base = torch.randint(0, 128, (10, 3, side, side), generator=draw)
    parts = []
    for count in (train, test):
        labels = torch.randint(0, 10, (count,), generator=draw)
        labels[:10] = torch.arange(10)
        noise = torch.randint(0, 128, (count, 3, side, side), generator=draw)
        parts.append(((base[labels] + noise).to(torch.uint8), labels))
    return from_arrays(*parts, name="patterns", scale=1 / 255).standardised()


def study(
    out: Path,
    runs_at_once: int | None = None,
    keep_state: bool = False,
    part_size: int | None = None,
    **changes: Any,
) -> PaperStudy:
    return PaperStudy(
        ConnectionSettings(**(TINY | changes)),
        out,
        data=images(),
        device="cpu",
        compute=Compute(updates_at_once=3),
        commit="abc",
        command="espalier paper",
        runs_at_once=runs_at_once,
        keep_state=keep_state,
        part_size=part_size,
    )


def run(out: Path, stop: Stop | None = None, **changes: Any) -> bool:
    return study(out, **changes).run(stop or Stop(), Progress())
