"""Law 7 for runs as a batch: R batched runs equal R single runs written with torch.optim and one mask at a time."""

from __future__ import annotations

import pytest
import torch
from standin import GatedMLP
from torch import Tensor, nn

import espalier
from espalier.data import Stream
from espalier.train.batched.batch import Batch, Compute, searched
from espalier.train.batched.masks import Given
from espalier.train.batched.optimizers import SGD, Adam, AdamW, Optimizer
from espalier.train.batched.schedule import Constant, Cosine, Steps

WIDTHS = [6, 7, 5, 3]
PENALTIES = [0.0, 0.3, -0.2]
RUNS, SAMPLES, SIZE = 3, 4, 8


def data(dtype: torch.dtype = torch.float64, n: int = 50) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(n, WIDTHS[0], generator=rng, dtype=dtype), torch.randint(0, WIDTHS[-1], (n,), generator=rng)


def initial(dtype: torch.dtype = torch.float64, runs: int = RUNS) -> tuple[list[GatedMLP], dict[str, Tensor]]:
    models = []
    for seed in range(runs):
        torch.manual_seed(seed)
        models.append(GatedMLP(WIDTHS, dtype))
    names = dict(models[0].model.named_parameters())
    stacked = {name: torch.stack([m.model.get_parameter(name).detach() for m in models]) for name in names}
    return models, stacked


def batch(
    params: dict[str, Tensor],
    source: object,
    optimizer: Optimizer,
    schedule: object,
    compute: Compute | None = None,
    loss: object = nn.functional.cross_entropy,
    total: int = 20,
) -> Batch:
    runs, dtype = len(params["0.weight"]), params["0.weight"].dtype
    return Batch(
        GatedMLP(WIDTHS).call, params, {}, data=data(dtype), seeds=range(runs), source=source, loss=loss,
        optimizer=optimizer, schedule=schedule, total=total, batch_size=SIZE, samples=SAMPLES, compute=compute,
    )  # fmt: skip


class Recorder:
    """A source that remembers the masks it handed out and the losses it was told."""

    def __init__(self, source: object) -> None:
        self.source, self.seen, self.told = source, [], []

    def __getattr__(self, name: str) -> object:
        return getattr(self.source, name)

    def masks(self, noise: object) -> Tensor:
        self.seen.append(self.source.masks(noise).clone())
        return self.seen[-1]

    def learn(self, masks: Tensor, losses: Tensor, noise: object) -> None:
        self.told.append(losses.clone())
        self.source.learn(masks, losses, noise)


OPTIMIZERS = {
    "sgd": (SGD(0.05, 0.9, 1e-2), lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True, weight_decay=1e-2)),
    "heavy ball": (SGD(0.05, 0.8, 0, False), lambda p: torch.optim.SGD(p, 0.05, 0.8)),
    "plain": (SGD(0.05, 0, 1e-2, False), lambda p: torch.optim.SGD(p, 0.05, weight_decay=1e-2)),
    "adam": (Adam(0.01, weight_decay=1e-2), lambda p: torch.optim.Adam(p, 0.01, weight_decay=1e-2)),
    "adamw": (AdamW(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
}
SCHEDULES = {
    "constant": (Constant(), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    "steps": (Steps(), lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [10, 15])),
    "cosine": (Cosine(), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)),
}


@pytest.mark.parametrize(("optimizer", "schedule"), [
    *((name, "steps") for name in OPTIMIZERS), ("sgd", "cosine"), ("adam", "constant")
])  # fmt: skip
def test_batched_runs_equal_single_runs(optimizer: str, schedule: str) -> None:
    models, params = initial()
    d = models[0].d
    search = espalier.Search(d, penalty=PENALTIES, samples=SAMPLES, batch=(RUNS,), seed=3)
    source = Recorder(searched(search))
    engine = batch(params, source, OPTIMIZERS[optimizer][0], SCHEDULES[schedule][0])
    read = Stream(range(RUNS), 50).take(20, SIZE)
    engine.advance(20)
    inputs, targets = data()
    for run, model in enumerate(models):
        alone = espalier.Search(d, penalty=PENALTIES[run], samples=SAMPLES)
        inner = OPTIMIZERS[optimizer][1](model.model.parameters())
        scheduler = SCHEDULES[schedule][1](inner)
        for update in range(20):
            masks, index = source.seen[update][run], read[update][run]
            tensors = dict(model.model.named_parameters())
            losses = torch.stack(
                [
                    nn.functional.cross_entropy(model.call(tensors, m.double(), inputs[index]), targets[index])
                    for m in masks
                ]
            )
            torch.testing.assert_close(source.told[update][run], losses.detach(), rtol=1e-10, atol=1e-10)
            inner.zero_grad()
            losses.mean().backward()
            inner.step()
            scheduler.step()
            alone.tell(masks, losses.detach())
        torch.testing.assert_close(search.theta[run], alone.theta, rtol=1e-10, atol=1e-10)
        for name, p in model.model.named_parameters():
            torch.testing.assert_close(engine.state.params[name][run], p.detach(), rtol=1e-10, atol=1e-10)
