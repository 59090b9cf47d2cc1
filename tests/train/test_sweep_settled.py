"""Once their masks are fixed the runs of a sweep train as smaller networks of one shape. What comes out is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.train.batched import SGD, AdamW, Run, batch_engine
from espalier.train.descent import Optimizer
from espalier.train.settled import OneShape, of_one_shape

X = torch.rand(160, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(5, (160,), generator=torch.Generator().manual_seed(1))
TRAIN, TEST = (X[:128], Y[:128]), (X[128:], Y[128:])


def layers() -> nn.Module:
    net = [nn.Flatten(), nn.Linear(108, 24), nn.ReLU(), nn.Linear(24, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 5)]
    return nn.Sequential(*net).double()


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10), nn.ReLU(),
        nn.Conv2d(10, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 5),
    ).double()  # fmt: skip


def sigmoids() -> nn.Module:
    """Half for a zero: runs of other widths have no shape in common."""
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 24), nn.Sigmoid(), nn.Linear(24, 5)).double()


def placed() -> nn.Module:
    """Gates by hand, and a layer that may lose all its units."""
    gates = espalier.Gate(24, least=0), espalier.Gate(16, least=0)
    first, second = (nn.Linear(108, 24), nn.ReLU(), gates[0]), (nn.Linear(24, 16), nn.ReLU(), gates[1])
    return nn.Sequential(nn.Flatten(), *first, *second, nn.Linear(16, 5)).double()


class Watch(espalier.Callback):
    """The shapes that are trained, by epoch."""

    def __init__(self) -> None:
        self.shapes: list[list[tuple[int, ...]]] = []

    def on_epoch(self, loop: Any, rows: Any) -> None:
        params = loop.engine.batch.state.params.values()
        self.shapes.append([tuple(p.shape) for p in params if p.ndim > 2])


def sweep(factory: Callable[[], nn.Module], *, masked: bool = False, **given: Any) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        if masked:
            patch.setattr(batch_engine, "of_one_shape", lambda *_: None)
        settings = {"epochs": 6, "batch_size": 16, "validation": TEST, "quiet": True} | given
        return espalier.sweep(factory, TRAIN, **settings)


def assert_same(ours: list[Any], masked: list[Any]) -> None:
    for a, b in zip(ours, masked, strict=True):
        assert a.mask.equal(b.mask)
        for (name, one), other in zip(a.model.state_dict().items(), b.model.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=name)
        for row, other in zip(a.history, b.history, strict=True):
            assert row["loss"] == pytest.approx(other["loss"], rel=1e-9)
            assert row["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-9)


@pytest.mark.parametrize("optimizer", [SGD(0.1), AdamW(0.01)])
@pytest.mark.parametrize("factory", [layers, images])
def test_settled_runs_train_as_small_networks_and_end_the_same(
    factory: Callable[[], nn.Module], optimizer: Optimizer
) -> None:
    watch = Watch()
    ours = sweep(factory, targets=[0.2, 0.5], seeds=[0, 1], optimizer=optimizer, callbacks=[watch])
    assert_same(ours, sweep(factory, masked=True, targets=[0.2, 0.5], seeds=[0, 1], optimizer=optimizer))
    whole, trained = ([shape[1] for shape in shapes][:2] for shapes in (watch.shapes[0], watch.shapes[-1]))
    kept = torch.stack([torch.stack([part.sum() for part in result.mask.split(whole)]) for result in ours])
    assert len(kept.unique(dim=0)) > 1, "all runs are as wide: nothing was padded"
    assert trained == kept.amax(0).tolist() < whole


def test_given_masks_are_small_networks_from_the_first_update() -> None:
    masks = torch.zeros(3, 40)
    masks[0, 3:9] = masks[0, 24:30] = 1
    masks[1, :4] = masks[1, 30:] = 1
    masks[2, 5:7] = masks[2, 24:26] = 1
    runs = [Run(seed, mask=mask) for seed, mask in enumerate(masks)]
    for factory in (layers, placed):
        watch = Watch()
        ours = sweep(factory, runs=runs, epochs=3, callbacks=[watch])
        assert watch.shapes == [[(3, 6, 108), (3, 10, 6), (3, 5, 10)]] * 3
        assert_same(ours, sweep(factory, masked=True, runs=runs, epochs=3))


def test_what_has_no_shape_in_common_is_trained_masked() -> None:
    watch = Watch()
    sweep(sigmoids, targets=[0.2, 0.5], callbacks=[watch])
    assert watch.shapes[-1] == watch.shapes[0]
    dropped = Watch()
    sweep(layers, runs=[Run(0, dropout=0.5), Run(1, mask=torch.ones(40))], callbacks=[dropped])
    assert dropped.shapes[-1] == dropped.shapes[0]


@pytest.mark.parametrize("stop_after", [2, 4, 5])
def test_stopped_and_gone_on_it_is_the_same_to_the_last_bit(tmp_path: Path, stop_after: int) -> None:
    class Stop(espalier.Callback):
        def on_epoch(self, loop: Any, rows: Any) -> None:
            if rows[0]["epoch"] == stop_after:
                loop.limit.end = 0.0

    def run(folder: str, *callbacks: espalier.Callback) -> list[Any]:
        given = {"targets": [0.2, 0.5], "monitor": "validation_loss", "optimizer": AdamW(0.01)}
        return sweep(images, callbacks=callbacks, checkpoint=tmp_path / folder, **given)

    whole = run("whole")
    assert not run("parts", Stop())[0].finished
    for ours, theirs in zip(run("parts"), whole, strict=True):
        assert ours.finished
        for a, b in zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True):
            assert a.equal(b)


def test_what_is_cut_comes_back_into_its_places() -> None:
    gated = espalier.attach(layers(), X[:4])
    masks = torch.zeros(2, gated.d)
    masks[0, :3] = masks[0, 24:28] = masks[1, 10:14] = masks[1, 30:] = 1
    names = [name for name, _ in gated.model.named_parameters()]
    smaller = of_one_shape(gated, masks, names)
    assert isinstance(smaller, OneShape)
    for name, tensor in gated.model.named_parameters():
        stack = torch.stack([tensor.detach(), tensor.detach() + 1])
        kept, pieces = stack.clone(), smaller.cut(stack, name)
        assert stack.equal(kept)  # what is cut is left as it is
        smaller.write(stack, pieces * 2, name)
        changed: Tensor = stack != kept
        assert int(changed.sum()) == sum(
            p.numel() for m in masks for n, p in gated.compact(m).named_parameters() if n == name
        )
        assert stack[changed].equal(kept[changed] * 2)
