"""One rank by nccl: every message goes through it, and what comes out is what a process without a group gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import distributed as dist

import espalier

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("parallel", ["data", "structure"])
def test_one_rank_by_nccl_is_a_process_alone(parallel: str, tmp_path: Path) -> None:
    def fitted(**more: Any) -> tuple[espalier.Result, dict[str, torch.Tensor]]:
        model = networks.resnet().double()
        (x, y), _ = networks.digit_images(320)
        settings: dict[str, Any] = {"epochs": 5, "batch_size": 32, "target": 0.4, "device": "cuda", "quiet": True}
        result = espalier.fit(model, (x.double(), y), recipe="ranked", validation=0.2, **settings, **more)
        return result, model.state_dict()

    alone, expected = fitted()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        result, found = fitted(parallel=parallel, checkpoint=tmp_path / "run")
        again, _ = fitted(parallel=parallel, checkpoint=tmp_path / "run")
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(result.theta, alone.theta, rtol=0, atol=1e-8)
    for name, value in expected.items():
        if "running" not in name:
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-8)
    assert again.theta.equal(result.theta)
    assert [row["loss"] for row in result.history] == pytest.approx([row["loss"] for row in alone.history])
