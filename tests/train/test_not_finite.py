"""A loss that is not finite means the same on every road: the weights stay, theta learns; if none is, the run ends."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import espalier
from espalier.data import Stream
from espalier.train import eager
from espalier.train.batched import AdamW
from espalier.train.batched.step import Step
from espalier.train.recipes import PAPER

UPDATES, SIZE, SAMPLES = 24, 8, 4
SETTINGS: dict[str, Any] = {"penalty": 0.0, "recipe": PAPER, "samples": SAMPLES}
ROADS = ["closure", "fused", "one pass", "compiled", "lightning", "trainer", "sweep", "sweep, unseen", "sweep, chain"]


def order(seed: int) -> Tensor:
    """Which examples each update reads ``(updates, size)``, on all roads."""
    return Stream(seed, 64).take(UPDATES, SIZE)


class Road:
    """One run of 24 updates, and what it tells the search. ``weights``: as they are when it ends, however it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, bad: float, seed: int) -> None:
        self.patch, self.folder, self.seed = monkeypatch, folder, seed
        self.model, self.x, self.y = networks.spoilt(bad, seed)
        self.masks, self.losses = list[Tensor](), list[Tensor]()
        learn = espalier.Search.learn

        def noted(search: espalier.Search, masks: Tensor, losses: Tensor, *more: Any) -> Tensor:
            self.masks.append(masks.reshape(SAMPLES, -1).clone())
            self.losses.append(losses.reshape(SAMPLES).clone())
            return learn(search, masks, losses, *more)

        monkeypatch.setattr(espalier.Search, "learn", noted)

    def run(self, road: str) -> dict[str, Tensor]:
        if road.startswith("sweep"):
            return self.sweep(road)
        weights: dict[str, Tensor] = {}
        step = espalier.StructureOptimizer.step

        def kept(structure: Any, *args: Any, **more: Any) -> Tensor:
            try:
                return step(structure, *args, **more)
            finally:
                weights.update({name: p.detach().clone() for name, p in structure.gated.model.named_parameters()})

        self.patch.setattr(espalier.StructureOptimizer, "step", kept)
        self.weights = weights
        {"closure": self.closure, "fused": self.closure, "lightning": self.lightning, "trainer": self.trainer}.get(
            road, self.fit
        )(road)
        return {name.removeprefix("body."): tensor for name, tensor in weights.items()}

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.x[index], self.y[index]) for index in order(self.seed)]

    def inner(self, model: nn.Module) -> torch.optim.Optimizer:
        return AdamW(0.01, weight_decay=0.1).torch(model.parameters())

    def closure(self, road: str) -> None:
        inner = self.inner(self.model)
        if road == "fused":  # it steps, and is told not to
            inner = torch.optim.AdamW(self.model.parameters(), 0.01, weight_decay=0.1, fused=True)
        shaping = espalier.shape(self.model, self.x[:4], inner, updates=UPDATES, seed=self.seed, **SETTINGS)

        def closure(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(shaping.network(x), y)
            loss.backward()
            return loss

        for x, y in self.batches():
            shaping.step(closure, x, y)

    def fit(self, road: str) -> None:
        if road == "compiled":
            self.patch.setattr(eager, "Compiling", functools.partial(eager.Compiling, backend="eager"))
        espalier.fit(
            self.model, (self.x, self.y), epochs=3, batch_size=SIZE, seed=self.seed, optimizer=self.inner_of,
            schedule="constant", compile=road == "compiled", quiet=True, **SETTINGS,
        )  # fmt: skip

    def inner_of(self, parameters: Any) -> torch.optim.Optimizer:
        return AdamW(0.01, weight_decay=0.1).torch(parameters)

    def lightning(self, road: str) -> None:
        lightning = pytest.importorskip("lightning.pytorch")
        from espalier.integrations.lightning import Shaping

        class Module(lightning.LightningModule):
            def __init__(self, body: nn.Module, inner: Any) -> None:
                super().__init__()
                self.body, self.inner = body, inner

            def forward(self, x: Tensor) -> Tensor:
                return self.body(x)

            def training_step(self, batch: Any, _: int) -> Tensor:
                return F.cross_entropy(self(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return self.inner(self)

        x, y = (torch.cat(parts) for parts in zip(*self.batches()))
        shaping = Shaping(seed=self.seed, example=self.x[:4], **SETTINGS)
        training = lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[shaping],
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=self.folder,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's advice on loaders
            training.fit(Module(self.model, self.inner), DataLoader(TensorDataset(x, y), SIZE))

    def trainer(self, road: str) -> None:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        from espalier.integrations.transformers import ShapingTrainer

        class Model(nn.Module):
            def __init__(self, body: nn.Module) -> None:
                super().__init__()
                self.body = body

            def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
                logits = self.body(x)
                return {"loss": F.cross_entropy(logits, labels), "logits": logits}

        model = Model(self.model)
        arguments = transformers.TrainingArguments(
            str(self.folder), num_train_epochs=1, per_device_train_batch_size=SIZE, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, use_cpu=True, lr_scheduler_type="constant", max_grad_norm=0.0,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        data = [{"x": x, "labels": y} for part in self.batches() for x, y in zip(*part)]
        ShapingTrainer(
            model, arguments, train_dataset=data, optimizers=(self.inner(model), None), structure_seed=self.seed,
            **SETTINGS,
        ).train()  # fmt: skip

    def sweep(self, road: str) -> dict[str, Tensor]:
        from espalier.train.batched.batch_engine import BatchEngine

        if road != "sweep":  # as on a GPU: nothing is looked at
            self.patch.setattr(Step, "exactly", Step.__call__)
        engines = list[BatchEngine]()
        results = BatchEngine.advance
        self.patch.setattr(
            BatchEngine, "advance", lambda engine, *args: (engines.append(engine), results(engine, *args))
        )
        loss = F.cross_entropy if road == "sweep, chain" else lambda out, y: F.cross_entropy(out, y)
        try:
            espalier.sweep(
                lambda: networks.spoilt(seed=self.seed)[0], (self.x, self.y), penalties=[0.0], seeds=[self.seed],
                epochs=3, batch_size=SIZE, samples=SAMPLES, recipe=PAPER, optimizer=AdamW(0.01, weight_decay=0.1),
                schedule="constant", loss=loss, quiet=True, device="cpu",
            )  # fmt: skip
        finally:
            self.weights = {name: p[0].clone() for name, p in engines[0].batch.state.params.items()}
        assert (engines[0].batch.step.chain is not None) == (road == "sweep, chain")
        assert int(engines[0].batch.state.skipped[0]) == sum(not one.isfinite().all() for one in self.losses)
        return self.weights

    def expected(self) -> dict[str, Tensor]:
        """Where the weights end, written out: a step where all losses are finite, else none at all."""
        model = networks.spoilt(seed=self.seed)[0]
        gated, inner = espalier.attach(model, self.x[:4]), self.inner(model)
        for masks, losses, (x, y) in zip(self.masks, self.losses, self.batches(), strict=True):
            own = [F.cross_entropy(gated.call(dict(model.named_parameters()), mask, x), y) for mask in masks]
            torch.testing.assert_close(losses, torch.stack(own).detach(), rtol=1e-10, atol=1e-10, equal_nan=True)
            if losses.isfinite().all():
                inner.zero_grad()
                torch.stack(own).mean().backward()
                inner.step()
        return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("road", ROADS)
def test_where_a_mask_has_no_finite_loss_the_weights_stay(
    road: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    way = Road(monkeypatch, tmp_path, 1e200, 3)
    weights = way.run(road)
    spoilt = [not one.isfinite().all() for one in way.losses]
    assert any(spoilt[:-1]), "the case is to occur"
    assert all(one.isfinite().any() for one in way.losses)
    for name, tensor in way.expected().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("road", ROADS)
def test_where_none_has_the_run_ends_and_the_update_is_named(
    road: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    way = Road(monkeypatch, tmp_path, float("nan"), 0)
    first = int((order(0) == 20).logical_or(order(0) == 41).any(1).nonzero()[0]) + 1
    assert first > 1
    with pytest.raises(
        espalier.Diverged, match=f"update {first} of {UPDATES}: every loss of an update was infinite or"
    ):
        way.run(road)
    assert all(tensor.isfinite().all() for tensor in way.weights.values())
