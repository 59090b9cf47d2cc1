"""What a study asks of an experiment: its settings, its network, and what an evaluation of it tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.space import Space
from espalier.study.settings import RunSpec
from espalier.train.batched.batch import Batch
from espalier.train.batched.chain import Chain
from espalier.train.batched.step import Gradient, Loss, Named

Row = dict[str, Any]
Pair = tuple[Tensor, Tensor]


class Plan(Protocol):
    """The settings that every experiment has; see :class:`espalier.study.settings.Settings`."""

    @property
    def dataset(self) -> str: ...
    @property
    def methods(self) -> tuple[str, ...]: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def theta_rate(self) -> float | None: ...
    @property
    def initial(self) -> float: ...
    @property
    def settle(self) -> float: ...
    @property
    def cost(self) -> str: ...
    @property
    def adaptive(self) -> bool: ...
    @property
    def permuted(self) -> bool: ...
    @property
    def held_out(self) -> int: ...
    @property
    def points(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def pad(self) -> int:
        """Images are padded by so much, cropped back and mirrored at random; 0 leaves them as they are."""
        ...

    @property
    def folder(self) -> str:
        """Runs that may not stand in one table are kept in folders of their own."""
        ...

    @property
    def evaluated_on(self) -> str: ...

    def updates(self, examples: int) -> int: ...
    def describe(self, method: str) -> Row: ...
    def runs(self, method: str) -> list[RunSpec]: ...


@dataclass(frozen=True, eq=False)
class Evaluation:
    """loss, error: ``(R)``. shipped: of each run all tensors of its module, statistics included, where known."""

    loss: Tensor
    error: Tensor
    shipped: list[Named] | None = None


class Subject(Protocol):
    """A network with gates, as a function of stacked weights, and what its masks mean."""

    @property
    def space(self) -> Space: ...

    @property
    def groups(self) -> Sequence[slice | Tensor]:
        """Where the gates are in a mask that are counted together: of one layer, of one block."""
        ...

    @property
    def share(self) -> str:
        """The name of the share that progress shows."""
        ...

    def describe(self) -> Row:
        """What tells this network from another of its kind, for run files."""
        ...

    def layout(self) -> Row:
        """What tells two arrangements of the same weights apart, for checkpoints."""
        ...

    def call(self, params: Named, mask: Tensor, x: Tensor) -> Tensor:
        """One run under one mask ``(d)``."""
        ...

    @property
    def chain(self) -> Chain | None:
        """What the network is, where it is a chain of linear layers."""
        ...

    def gradient(self, loss: Loss) -> Gradient | None:
        """How all runs are differentiated together; None: ``call``, mapped over runs and masks."""
        ...

    def start(self, seeds: Sequence[int], masks: Tensor, device: torch.device) -> Named:
        """Initial weights ``(R, ...)``. masks ``(R, d)``: what is open to runs with a given mask, else ones."""
        ...

    def given(self, run: RunSpec) -> tuple[Tensor, Row]:
        """The mask ``(d)`` a run starts with, and how it was come by."""
        ...

    def canonical(self, masks: Tensor) -> Tensor: ...

    def cost(self, kind: str) -> Cost: ...

    def tell(self, masks: Tensor) -> list[Row]:
        """Counts and shares of each mask ``(R, d)``."""
        ...

    def found(self, masks: Tensor) -> list[Row]:
        """The same of canonical masks ``(R, d)``, and what else is known of the network that ships."""
        ...

    def evaluate(self, batch: Batch, masks: Tensor, test: Pair, last: bool) -> Evaluation:
        """Every run under its canonical mask ``(R, d)`` on the test images; last: at the end of the run."""
        ...

    def reads(self, test: Pair, last: bool) -> int:
        """How many images that takes for one run: an estimate of its time."""
        ...

    def stochastic(self, batch: Batch, theta: Tensor, test: Pair, seed: int) -> tuple[int, Tensor, Tensor] | None:
        """Draws, loss and error ``(R)`` of the mean prediction of structures drawn from theta; None: not measured."""
        ...
