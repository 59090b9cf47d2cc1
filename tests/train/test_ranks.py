"""Several processes train one run by torch.distributed: what comes out is what one process gives, on every rank."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

HERE = Path(__file__).parent
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 1, 2 and 4 ranks came to, a file for each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, str(HERE / "ranks_together.py"), str(folder), "1", "2", "4"]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def of(runs: Path, count: int, rank: int = 0) -> Tensors:
    return load_file(runs / f"{count}-{rank}.safetensors")


@pytest.mark.parametrize("count", [2, 4])
def test_they_come_to_what_one_process_comes_to(runs: Path, count: int) -> None:
    """Fifty updates in float64: weights, theta, the compact network with its BatchNorm, losses and errors."""
    alone, together = of(runs, 1), of(runs, count)
    compared = [name for name in together if not name.startswith("loaders/")]
    assert {name.partition("/")[0] for name in compared} >= {"data", "structure-ranked", "closed"}
    for name in compared:
        torch.testing.assert_close(together[name], alone[name], rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("count", [2, 4])
def test_every_rank_has_the_same_to_the_last_bit(runs: Path, count: int) -> None:
    first = of(runs, count)
    for rank in range(1, count):
        other = of(runs, count, rank)
        assert other.keys() == first.keys()
        assert [name for name in first if name != "loaders/noise" and not first[name].equal(other[name])] == []


def test_dropout_draws_apart_and_goes_on_alike(runs: Path) -> None:
    one, two = (of(runs, 2, rank)["loaders/noise"] for rank in (0, 1))
    assert 0.4 < float(one.mean()) < 0.6
    assert 0.3 < float((one != two).double().mean()) < 0.7


def test_an_operation_that_other_masks_use_takes_part(runs: Path) -> None:
    """In some updates no mask of any rank runs it, and its weights rest as in one process; in others some do."""
    used = of(runs, 1)["closed/used"]
    assert used.any()
    assert not used.all()


def test_the_weights_of_all_ranks_stay_where_a_loss_of_one_is_not_finite(runs: Path) -> None:
    for parallel in ("data", "structure"):
        assert of(runs, 2)[f"not-finite/{parallel} kept"].tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("seed", ["seed: 0 there, 1 here", "rank 1 on"]),
        ("data", ["data.sha256"]),
        ("loss", ["loss", "cross_entropy"]),
        ("loader", ["the first batch of an epoch"]),
        ("network", ["model"]),
        ("masks", ["1 mask for 2 ranks", "samples=2"]),
        ("silent", ["2 ranks", "parallel='data'", "'structure'", "'none'"]),
        ("batch", ["batch_size=3", "multiple of 2"]),
        ("wrapped", ["model.module"]),
        ("sharded", ["FSDP2", "fully_shard"]),
        ("word", ["did you mean 'data'?"]),
    ],
)
def test_what_cannot_be_is_said_by_every_rank_before_training(runs: Path, case: str, words: list[str]) -> None:
    for rank in (0, 1):
        with safe_open(runs / f"2-{rank}.safetensors", "pt") as file:
            said = ast.literal_eval(file.metadata()["said"])[case]
        assert "\n" not in said
        for word in words:
            assert word in said
