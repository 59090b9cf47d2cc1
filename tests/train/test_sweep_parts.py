"""The parts of a sweep on their own: losses, schedules, lists of runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import espalier
from espalier.space import BadInput
from espalier.train.batched import Adam, Run, Steps
from espalier.train.batched.inputs import Reading, ResidentFeed
from espalier.train.batched.runs import batches, listed
from espalier.train.batched.step import cross_entropy
from espalier.train.descent import SGD


def test_cross_entropy_is_torchs_value_and_gradient() -> None:
    torch.manual_seed(0)
    out = (torch.randn(7, 5, dtype=torch.float64) * 4).requires_grad_()
    y = torch.randint(0, 5, (7,))
    mine, theirs = cross_entropy(out, y), nn.functional.cross_entropy(out, y)
    torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(torch.autograd.grad(mine, out), torch.autograd.grad(theirs, out))


def test_an_impossible_other_class_costs_nothing() -> None:
    out = torch.tensor([[0.0, -torch.inf]])
    assert cross_entropy(out, torch.tensor([0])).item() == 0.0


def test_steps_drop_in_the_order_of_their_shares() -> None:
    schedule = Steps(at=(0.9, 0.75), by=2.0)
    factors = [schedule.factor(torch.tensor(done), 100).item() for done in (0, 74, 75, 89, 90)]
    assert factors == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("runs", [1, 3])
def test_one_update_of_many_is_laid_out_as_one_alone(runs: int) -> None:
    """Else a compiled update would be compiled again, and on a GPU in the middle of a recording."""
    data = torch.zeros(20, 1, 4, 4), torch.zeros(20, dtype=torch.int64)
    feed = ResidentFeed(data, list(range(runs)), device=torch.device("cpu"), pad=1)
    alone, many = feed.take(1, 4).at(0), feed.take(5, 4)
    assert alone.crops is not None
    assert many.crops is not None
    many = Reading(many.index.clone(), tuple(crop.clone() for crop in many.crops)).at(3)  # as a recording keeps it
    assert many.crops is not None
    for one, other in zip((alone.index, *alone.crops), (many.index, *many.crops)):
        assert one.stride() == other.stride()


def test_how_data_are_read_goes_to_their_device_with_them() -> None:
    """Else every update would copy it there, which nothing that is recorded may do."""
    stored = ResidentFeed(espalier.data.load("digits"), [0], device=torch.device("meta")).stored
    assert stored.affine is not None
    assert {tensor.device.type for tensor in (stored.inputs, stored.targets, *stored.affine)} == {"meta"}


def test_runs_of_equal_shape_are_batched_in_order() -> None:
    runs = [
        Run(0, target=0.5),
        Run(1, penalty=0.1),
        Run(2, target=0.2),
        Run(3),
        Run(4, all_open=True),
        Run(5, dropout=0.5),
    ]
    assert batches(runs, None) == [[0, 2], [1, 3], [4, 5]]
    assert batches(runs, 1) == [[0], [2], [1], [3], [4], [5]]


def test_settings_are_outermost_and_the_plain_method_is_the_default() -> None:
    assert [(r.penalty, r.seed) for r in listed(None, [1, 2], [0.1, 0.2], None, None, None)] == [
        (0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2),
    ]  # fmt: skip
    assert [r.penalty for r in listed(None, [0], None, None, None, None)] == [0.0]


@pytest.mark.parametrize(
    "given",
    [
        {"penalty": 0.1, "target": 0.5},
        {"mask": torch.ones(3), "penalty": 0.1},
        {"dropout": 0.5, "target": 0.5},
        {"all_open": True, "permuted": True},
    ],
)
def test_a_run_has_one_source_of_masks(given: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        Run(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SGD(lr=0.0),
        lambda: SGD(momentum=1.0),
        lambda: SGD(momentum=0.0),
        lambda: SGD(weight_decay=-1.0),
        lambda: Adam(betas=(0.9, 1.0)),
        lambda: Adam(eps=0.0),
        lambda: Steps(at=(1.5,)),
        lambda: Steps(by=0.0),
    ],
)
def test_settings_out_of_range_are_refused(make: object) -> None:
    with pytest.raises(BadInput):
        make()  # type: ignore[operator]


def test_the_snippets_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "docs/sweep.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    assert all(float(line.split()[-1]) < 0.15 for line in said)  # what a reader sees first is a network that works
    assert len(names["results"]) == 5  # type: ignore[arg-type]
