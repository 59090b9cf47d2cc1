"""What a run gives: rows of numbers and theta on its way; at its end the compact model, its mask, its history."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.files import clean
from espalier.records import COUNTED
from espalier.search import Search
from espalier.search.selection import most_expensive
from espalier.space import EspalierError, Space
from espalier.train.gradients import Gated
from espalier.train.scoring import Score

if TYPE_CHECKING:
    from espalier.train.batched.runs import Run

Row = dict[str, Any]
Columns = dict[str, Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What ``fit`` returns, and ``sweep`` for each of its runs.

    model: compact, in eval mode; of ``fit`` on the device it was trained on, of ``sweep`` on the CPU.
    mask: ``(d)`` float32, canonical, what the model was cut to.
    theta: ``(d)`` float64; None where the mask was given.
    history: one row for each epoch.
    finished: False where a time limit stopped the run: the model is what would ship now, and the same call goes on.
    target: the share of the full cost that was asked for, if one was.
    share_before: the share of the cost that the most probable mask keeps, before the selection.
    share_after: the share that the mask keeps that ships. Both are None where the mask was given.
    shares: of gates, weights and cost that the canonical mask keeps.
    sizes: by "units", "weights", "macs" (of one example) and "parameters", what that mask keeps, and all there is.
    cost: what the target or penalty counts, by its name.
    validation: the score of the compact model.
    penalty: how strongly cost counted at the end.
    run: of a sweep, what was asked of it. stopped: why a callback ended the run, or "".
    diverged: of a sweep, the first update without a finite loss. skipped: updates at which the weights stayed.
    explanation: of ``fit``, what each layer keeps and what is coupled to what, as ``gated.explain`` says it.
    order: the groups of gates from the input to the output; empty: as in the space.
    inputs: of data in a Dataset, what is done to stored inputs before the network reads them, in words.
    examples: a few inputs that the network was trained on, as it reads them, on the CPU: what ships is checked on them.
    latency: of a run with a measured cost, in milliseconds: predicted and measured of what ships, of the whole network
        (full) and of the smallest that there is, and how often the target was lowered for what was measured
        (corrections). latencies: that of each cost that was measured, where there are several, as of two runtimes;
        latency is then the one that is nearest to its limit, or furthest above it.
    search: of ``fit``, the search as it ended. gated: the gates, where ``fit`` was given them; those it attached by
    itself it has taken off again.
    """

    model: nn.Module
    mask: Tensor
    theta: Tensor | None
    history: list[Row]
    finished: bool
    target: float | None
    share_before: float | None
    share_after: float | None
    shares: dict[str, float | None]
    validation: Score | None
    penalty: float | None
    updates: int
    seconds: float
    space: Space
    sizes: dict[str, list[int]] = field(default_factory=dict)
    cost: str = ""
    run: Run | None = None
    stopped: str = ""
    diverged: int | None = None
    skipped: int = 0
    explanation: str = ""
    order: tuple[str, ...] = ()
    inputs: str = ""
    examples: Any = None
    latency: dict[str, Any] | None = None
    latencies: tuple[dict[str, Any], ...] = ()
    search: Search | None = None
    gated: Gated | None = None

    @property
    def validation_loss(self) -> float | None:
        return None if self.validation is None else self.validation.loss

    @property
    def validation_error(self) -> float | None:
        return None if self.validation is None else self.validation.error

    @property
    def validation_examples(self) -> int | None:
        return None if self.validation is None else self.validation.examples

    @property
    def kept(self) -> dict[str, list[int]]:
        """Of each group of gates, how many are open, of how many; from the input to the output."""
        slices = [(name, self.space.slices[name]) for name in self.order or self.space.slices]
        return {name: [int(self.mask[where].sum()), where.stop - where.start] for name, where in slices}

    @property
    def counted(self) -> str:
        """What the target or penalty counts, in words."""
        return "cost" if self.cost in ("", "given") else COUNTED.get(self.cost, self.cost)

    @property
    def warning(self) -> str:
        """Says that the network has not learned, if a constant answer is as good on the validation data; else ""."""
        score = self.validation
        if score is None or score.learned:
            return ""
        if score.error is not None:
            said = f"its error of {score.error:.2%} is no better than that of always guessing the most frequent class"
            said += f", {score.guess:.2%}"
        else:
            said = f"its loss of {score.loss:.4g} is no better than that of a constant guess, {score.guess:.4g}"
        way = "train longer" if self.target is None else f"use a larger target than {self.target:.2%}, or train longer"
        way += "; divide the targets of a regression by their deviation" if score.error is None else ""
        return f"the network has not learned: on the validation data {said}; {way}"

    def summary(self) -> dict[str, Any]:
        """The result as JSON-able numbers, for ``result.json``."""
        shared = ("finished", "target", "share_before", "share_after")
        own = ("penalty", "validation_loss", "validation_error", "validation_examples", "kept", "updates")
        words = {name: getattr(self, name) for name in shared} | self.shares
        words |= {name: getattr(self, name) for name in own} | {"seconds": round(self.seconds, 3), "sizes": self.sizes}
        if self.run is not None:
            words |= {"diverged": self.diverged, "skipped": self.skipped}
        words |= {} if self.latency is None else {"latency": self.latency}
        words |= {} if len(self.latencies) < 2 else {"latencies": list(self.latencies)}
        if self.validation is not None and self.validation.metrics:
            words |= {f"validation_{name}": value for name, value in self.validation.metrics.items()}
        notes = {"inputs": self.inputs, "stopped": self.stopped, "warning": self.warning}
        return words | {name: note for name, note in notes.items() if note}

    def explain(self) -> str:
        """What each layer keeps, what is coupled to what, and what is not gated and why; of a sweep, only the table."""
        return self.explanation or self.table()

    def table(self) -> str:
        """What each group of gates keeps, a line for each."""
        width = max((len(name) for name in self.kept), default=0)
        return "\n".join(
            f"{name:<{width}}  {kept:>6} of {full:>6}  {kept / full:>6.1%}  {'#' * round(20 * kept / full)}"
            for name, (kept, full) in self.kept.items()
        )

    def _repr_html_(self) -> str:
        """For a notebook: the summary, and a bar for each group of gates."""
        bar = '<meter min="0" max="{1}" value="{0}"></meter>'
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{kept:,} of {full:,}</td><td>{bar.format(kept, full)}</td></tr>"
            for name, (kept, full) in self.kept.items()
        )
        return f"<p>{escape(str(self))}</p><table>{rows}</table>"

    def __repr__(self) -> str:
        return f"Result({self})"

    def __str__(self) -> str:
        text = "" if self.target is None else f"target {self.target:.2%} of the {self.counted}, "
        if self.share_before is not None:
            text += f"reached {self.share_before:.2%} before the selection and {self.share_after:.2%} after it; "
        weights = self.shares["weight_share"]
        if weights is not None:
            text += f"{weights:.2%} of the weights are kept"
        if self.validation_error is not None:
            text += f", validation error {self.validation_error:.2%}"
        for name, value in ({} if self.validation is None else self.validation.metrics).items():
            text += f", {name} {value:.4g}"
        text = text.removesuffix("; ")
        for row in self.latencies or ([] if self.latency is None else [self.latency]):
            predicted, took, full = (f"{row[name]:.3g} ms" for name in ("predicted", "measured", "full"))
            where = f" in {row['runtime']} of {row['batch']} at once" if len(self.latencies) > 1 else ""
            text += f"; {took} measured{where}, {predicted} predicted, {full} uncut"
            if row["compared"] > row["most"]:
                text += f": it misses its {row['most']:.3g} ms"
                text += f"; the smallest network takes {row['smallest']:.3g} ms"
        if not bool(self.mask.any()):
            text += ". No gate is left: nothing leads from inputs to outputs; use a larger target, or train longer"
        return text


# ---- on the way: one flat row of numbers for each run, read from the device at once ----------------------------------


class Shares:
    """Shares of the full network that masks keep: of its gates, of its weights, and of the cost searched against. All
    of a cost is that of all gates open and the dearest options."""

    def __init__(self, gated: Gated, cost: Cost, device: torch.device) -> None:
        self.costs = {"unit_share": gated.cost("units"), "weight_share": gated.cost("weights"), "cost_share": cost}
        self.full = {name: one(most_expensive(gated.space, one, device).float()) for name, one in self.costs.items()}

    def __call__(self, masks: Tensor) -> Columns:
        """masks: ``(*batch, d)``; shares ``(*batch)``, NaN where there is nothing to share."""
        return {name: cost(masks) / self.full[name] for name, cost in self.costs.items()}


def sizes(gated: Gated, masks: Tensor) -> list[dict[str, list[int]]]:
    """What each of the masks ``(R, d)`` keeps of the network, and all there is of it; MACs of one example."""
    counted: list[dict[str, list[int]]] = [{} for _ in masks]
    for kind in COUNTED:
        with suppress(EspalierError):  # gates of one's own may not know every kind
            cost, per = gated.cost(kind), getattr(gated, "examples", 1) if kind == "macs" else 1
            full = round(float(cost(most_expensive(gated.space, cost, masks.device))) / per)
            for one, kept in zip(counted, cost(masks).tolist(), strict=True):
                one[kind] = [round(kept / per), full]
    return counted


def rows(columns: Mapping[str, Tensor]) -> list[Row]:
    """columns: ``(R)`` each. A row for each run; what is not finite is None, as JSON has no word for it."""
    table = torch.stack([column.to(torch.float64).reshape(-1) for column in columns.values()], -1).tolist()
    return [dict(zip(columns, clean(row), strict=True)) for row in table]


class Thinned:
    """Theta over time: at most ``most`` snapshots, every second one dropped whenever they are too many."""

    def __init__(self, most: int = 128) -> None:
        self.most, self.stride = most, 1
        self.updates: list[int] = []
        self.snapshots: list[Tensor] = []
        self.offered = 0

    def offer(self, update: int, theta: Tensor) -> None:
        """theta: ``(R, d)``; kept as float32 on the CPU."""
        if self.offered % self.stride == 0:
            self.updates.append(update)
            self.snapshots.append(theta.detach().to("cpu", torch.float32, copy=True))
        self.offered += 1
        if len(self.updates) > self.most:
            self.updates, self.snapshots, self.stride = self.updates[::2], self.snapshots[::2], 2 * self.stride

    def table(self, run: int) -> dict[str, Tensor]:
        """Of one run: ``theta`` ``(snapshots, d)`` float32 and ``updates`` ``(snapshots)`` int64."""
        snapshots = [snapshot[run] for snapshot in self.snapshots]
        theta = torch.stack(snapshots) if snapshots else torch.empty(0, 0)
        return {"theta": theta, "updates": torch.tensor(self.updates, dtype=torch.int64)}

    def state_dict(self) -> dict[str, Any]:
        table = torch.stack(self.snapshots) if self.snapshots else torch.empty(0, 0, 0)
        return {"stride": self.stride, "updates": self.updates, "offered": self.offered, "table": table}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stride, self.updates, self.offered = state["stride"], list(state["updates"]), state["offered"]
        self.snapshots = list(state["table"].unbind()) if self.updates else []
