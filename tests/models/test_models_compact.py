"""The compact DenseNet: dead layers and unread channels are gone, outputs are the masked network's; its benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import espalier
from espalier.models import DenseNet
from espalier.study.study_batches import DenseNetGraph, mask_to_hex

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 3
GRAPH = DenseNetGraph(LAYERS)


@pytest.fixture(scope="module")
def gated():
    torch.manual_seed(0)
    model = DenseNet(GRAPH.depth, growth=4).double()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.running_mean, -0.5, 0.5)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
            nn.init.uniform_(norm.bias, -0.5, 0.5)
    return espalier.attach(model, torch.zeros(1, 3, 8, 8, dtype=torch.float64), check=False)


def place(block: int, reader: int, source: int) -> int:
    """Of a connection in the mask: of a block's layer 0, 1, .. or, last, of what closes it."""
    first = block * (LAYERS + 1) + 1
    ends = [(gate.source - first, gate.reader - first - 1) if gate.block == block else None for gate in GRAPH.gates]
    return ends.index((source, reader))


def without(*closed: tuple[int, int, int]) -> torch.Tensor:
    """All open but these: (block, reader, source)."""
    mask = torch.ones(GRAPH.d)
    for connection in closed:
        mask[place(*connection)] = 0
    return mask


CASES = {
    "unread layer": without((1, 1, 1), (1, 2, 1), (1, 3, 1)),
    "layer that reads nothing": without((0, 0, 0)),
    "chain of dead layers": without((2, 1, 0), (2, 1, 1), (2, 3, 1), (2, 2, 1)),
    "unread channels of the last layer": without((2, 3, 0), (2, 3, 2)),
    "block input read by the first layer alone": without(*((1, r, 0) for r in (1, 2, 3))),
    "one path": torch.zeros(GRAPH.d).index_fill(0, torch.tensor([place(b, 3, 0) for b in range(3)]), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_dead_layers_and_unread_channels_are_gone_and_nothing_else_changes(gated, name):
    mask = CASES[name]
    small, canonical = gated.compact(mask), gated.canonical(mask)
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for mode in (False, True):
        gated.model.train(mode)
        small.train(mode)
        with torch.no_grad(), gated.masked(canonical):
            masked = gated.model(x)
        out = small(x).detach()
        assert float((masked - out).abs().max() / masked.abs().max()) < 1e-9
        assert not torch.equal(out[0], out[1])  # the images are seen
    gated.model.eval()
    kept = sum(m.weight.numel() for m in small.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    assert kept == int(gated.cost("weights")(canonical))
    living = sum(bool(m.weight.numel()) for m in small.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    assert living == GRAPH.depth - len(GRAPH.paths(canonical)["dead_layers"])


def test_the_benchmark_prints_one_object_for_the_masks_of_run_files(tmp_path):
    folder = tmp_path / "runs" / "cifar10-1_epochs" / "search"
    folder.mkdir(parents=True)
    for k, mask in enumerate((CASES["unread layer"], torch.zeros(GRAPH.d))):
        story = {"format": 1, "settings": {"depth": GRAPH.depth, "growth": 4}, "result": {"mask": mask_to_hex(mask)}}
        story |= {"run": {}, "curve": [], "seconds": {}, "hardware": {}, "versions": {}}
        (folder / f"penalty_{k}-seed_0.json").write_text(json.dumps(story))
    beside = folder.with_name("random")
    beside.mkdir()
    (beside / "share_1-seed_0.json").write_text((folder / "penalty_0-seed_0.json").read_text())
    words = ["--depth", str(GRAPH.depth), "--growth", "4", "--side", "8", "--batches", "1,4", "--repeats", "2"]
    words += ["--only", "/search/"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "compact.py"), *words, "--runs", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["masks"] == "2 run files"
    first, second = told["runs"]
    assert first["mask"] == "cifar10-1_epochs/search/penalty_0-seed_0"
    assert max(first["difference_float64"].values()) < 1e-9
    assert first["counted_as_costed"] is True
    assert 0 < first["weight_share"] < 1
    assert 0 < first["mac_share"] < 1
    for batch in ("batch_1", "batch_4"):
        times = first[batch]["eager"]
        assert times["speed_up"] == pytest.approx(times["full_ms"] / times["compact_ms"], rel=0.01)
    assert "no path" in second["note"]
