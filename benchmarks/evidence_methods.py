"""The methods of ``evidence.py``: one network trained and measured by a named setting, at equal budget for all."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier
from espalier.gates.recalibrate import recalibrate
from espalier.train import PRESETS, Recipe
from espalier.train.compiling import Compiling, Recording, as_it_is
from espalier.train.gradients import Update
from evidence_data import Images, Loader
from evidence_networks import build, count, count_widths, uniform, whole_widths, widths_of

# name: what to do. "like": the rest is as in that one. "of": the run of the same cell and seed whose widths, MACs or
# size is taken. "recipe": fields of espalier.train.Recipe, or the name of a preset. lr, weight_decay, schedule: where
# they differ from the command's.
SETTINGS: dict[str, dict[str, Any]] = {
    "ours": {"method": "shaped", "samples": 1, "recipe": "default", "permute": None},
    "ranked": {"like": "ours", "samples": 2, "recipe": "ranked"},
    "control": {"like": "ours", "permute": "all"},
    "control-group": {"like": "ours", "permute": "group"},
    "uniform": {"method": "scratch", "widths": "uniform"},
    "uniform-macs": {"method": "scratch", "widths": "macs", "of": "ours"},
    "found": {"method": "scratch", "widths": "found", "of": "ours"},
    "dense": {"method": "scratch", "widths": "whole"},
    "pruned": {
        "method": "pruned",
        "criterion": "taylor",  # l2, bn
        "batches": 10,  # whose gradients taylor reads
        "global": True,  # channels are ranked over all layers, else in each
        "least": 0.0,  # the share of a layer that always stays
        "dense": 0.5,  # the share of the updates before the first cut
        "steps": 1,
        "span": 0.1,  # the share of the updates over which several cuts are spread
        "anneal": True,  # the rate falls before the first cut and starts anew
        "fine": 1.0,  # from there on it is times this
        "regularize": 0.0,  # sparse training before the cut, for l2 and bn
    },
    "fastnas": {
        "like": "pruned",
        "criterion": "fastnas",  # ModelOpt chooses the widths
        "batches": 20,  # that it calibrates and scores by
        "divisor": 2,  # of its widths
        "score": "accuracy",  # loss
    },
    "oto": {
        "method": "oto",
        "start": 0.1,  # the share of the updates before the first period of its pruning
        "span": 0.4,  # that of all periods
        "periods": 10,
    },
    "finetuned": {"method": "finetuned", "like": "ours", "recipe": "finetune", "dense": 0.5, "anneal": True},
    "finetuned-long": {"like": "finetuned", "recipe": {"ramp": 0.4, "settle": 0.5}},  # as the recipe was
    "pruned-least": {"like": "pruned", "least": 0.05},
    "pruned-local": {"like": "pruned", "global": False},
    "pruned-steps": {"like": "pruned", "steps": 10},
    "pruned-through": {"like": "pruned", "anneal": False},
    "pruned-early": {"like": "pruned", "dense": 0.3},
    "pruned-late": {"like": "pruned", "dense": 0.7},
    "pruned-l2": {"like": "pruned", "criterion": "l2"},
    "pruned-bn": {"like": "pruned", "criterion": "bn", "regularize": 1e-4},
    "fastnas-loss": {"like": "fastnas", "score": "loss"},
    "fastnas-through": {"like": "fastnas", "anneal": False},
    "ours-fastnas-through": {"like": "ours", "of": "fastnas-through"},  # no more MACs and no more weights than it
    "ours-oto-fours": {"like": "ours", "of": "oto-fours"},
    "oto-late": {"like": "oto", "start": 0.3},
    "oto-once": {"like": "oto", "periods": 1},
    "oto-fours": {"like": "oto", "divisible": 4},  # its widths are multiples of it
    "oto-twos": {"like": "oto", "divisible": 2},
}
WARM = 0.05  # the share of a run over which the rate rises, in schedules that fall to 0
OPTIMISER = ("weights_learning_rate", "momentum", "weight_decay", "drops")  # fields of a recipe that are of the weights


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The one over the other; recipes field by field."""
    both = copy.deepcopy(base) | copy.deepcopy(more)
    if isinstance(more.get("recipe"), dict) and "recipe" in base:
        named = base["recipe"]
        both["recipe"] = (asdict(PRESETS[named]) if isinstance(named, str) else named) | more["recipe"]
    return both


def resolved(settings: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """A setting with all that it takes from the one it is like."""
    if name not in settings:
        raise SystemExit(f"there is no setting {name!r}, only {', '.join(settings)}")
    own = dict(settings[name])
    like = own.pop("like", None)
    return own if like is None else merged(resolved(settings, like), own)


def recipe_of(setting: dict[str, Any]) -> Any:
    """The recipe of a setting of ours."""
    given = setting["recipe"]
    if isinstance(given, str):
        return PRESETS[given]
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if "learning_rate" in fields:  # as lines of an earlier revision have it
        fields["weights_learning_rate"] = fields.pop("learning_rate")
    return Recipe(**fields)


def complete(setting: dict[str, Any]) -> dict[str, Any]:
    """A setting with every field of its recipe that has an effect, as a line has it: two of them are equal where
    nothing differs. The optimiser of the weights is the budget's, and the setting names the samples, so that the
    recipe's own have none."""
    if "recipe" not in setting:
        return setting
    fields_of = asdict(recipe_of(setting))
    listed = {name: value for name, value in fields_of.items() if name not in {*OPTIMISER, "samples"}}
    return setting | {"recipe": listed}


def rate(schedule: str, update: int, updates: int) -> float:
    """The factor of the learning rate in this update, from 0, of so many."""
    if schedule == "steps":
        return 0.1 ** sum(update >= math.ceil(share * updates) for share in (0.75, 0.9))
    warm = max(1, round(WARM * updates))
    if update < warm:
        return (update + 1) / (warm + 1)
    left = (updates - update) / (updates - warm + 1)
    if schedule == "linear":
        return left
    if schedule == "cosine":
        return (1 - math.cos(math.pi * left)) / 2
    raise SystemExit(f"a schedule is linear, cosine or steps, not {schedule!r}")


@dataclass(frozen=True)
class Budget:
    """What every run of a command has: examples in an update, updates, and the weights' optimiser."""

    epochs: int
    batch: int
    updates: int
    lr: float
    weight_decay: float
    schedule: str

    def optimizer(
        self, parameters: Iterable[Tensor], updates: int | None = None, done: int = 0
    ) -> torch.optim.Optimizer:
        """SGD with Nesterov momentum, whose rate follows the schedule by itself, from update to update.

        updates: those of its schedule, of which so many are ``done``.
        """
        total = self.updates if updates is None else updates
        parameters = list(parameters)
        optimizer = torch.optim.SGD(
            parameters,
            self.lr,
            momentum=0.9,
            nesterov=True,
            weight_decay=self.weight_decay,
            fused=parameters[0].is_cuda,
        )
        return self.scheduled(optimizer, total, done)

    def scheduled(self, optimizer: Any, total: int, done: int = 0) -> Any:
        """The same optimizer, whose rate follows the schedule of so many updates."""

        def follow(*_: Any) -> None:
            nonlocal done
            for group in optimizer.param_groups:
                group["lr"] = self.lr * rate(self.schedule, done, total)
            done += 1

        follow()
        optimizer.register_step_post_hook(follow)
        return optimizer


@dataclass(frozen=True)
class Case:
    """One run: its network, size, seed, budget and setting, on images. parent: the line of the run it builds on.
    compile: networks are compiled, those of ours and of plain training. trained: whole networks that other runs of this
    process have trained, see ``finetuned``."""

    network: str
    narrow: int
    cost: str | None
    target: float | None
    seed: int
    setting: dict[str, Any]
    budget: Budget
    images: Images
    parent: dict[str, Any] | None = None
    compile: bool = False
    trained: dict[Any, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.images.device

    @property
    def whole(self) -> list[int]:
        return whole_widths(self.network, self.narrow)

    def count(self, widths: list[int] | None = None) -> dict[str, int]:
        """Of the whole network, or of one of these widths."""
        return count_widths(self.network, self.whole if widths is None else widths, self.images.shape)

    def limit(self) -> float:
        """What the network may cost."""
        assert self.cost is not None
        assert self.target is not None
        return self.target * self.count()[self.cost]

    def start(self, widths: list[int]) -> nn.Module:
        """A new network of these widths, its weights those of the seed; on the CPU."""
        torch.manual_seed(self.seed)
        return build(self.network, widths, self.images.shape[0])

    def place(self, model: nn.Module) -> nn.Module:
        if self.device.type == "cuda":
            return model.to(self.device, memory_format=torch.channels_last)
        return model.to(self.device)

    def loader(self, samples: int = 1) -> Loader:
        if self.budget.batch % samples:
            raise SystemExit(f"{self.budget.batch} examples cannot be shared alike by {samples} masks")
        updates = self.budget.updates // self.budget.epochs
        return Loader(self.images, self.budget.batch // samples, updates, updates * samples, self.seed)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()


class Outcome(NamedTuple):
    """What a method gives: the network it ends with, the loss on the training set in the last epoch, and the examples
    that were read, those for statistics of BatchNorm and for criteria of pruning included. spared: seconds of another
    run of this process that this one would have taken, too."""

    model: nn.Module
    loss: float
    read: int
    spared: float = 0.0


def train(
    case: Case,
    model: nn.Module,
    loader: Loader,
    optimizer: torch.optim.Optimizer,
    updates: int,
    extra: Callable[[], None] | None = None,
) -> float:
    """So many updates; returns the mean loss of the last epoch's. extra: called between gradient and step.

    On a GPU updates are recorded as those of ours are, so that seconds can be compared."""
    model.train()
    on_gpu = case.device.type == "cuda"
    compiling = Compiling() if case.compile else Compiling(backend=as_it_is)  # what is not traced is not recorded
    network = compiling.form(model) if on_gpu or case.compile else model
    total, last = torch.zeros((), device=case.device), min(updates, len(loader))
    parameters, no_mask = list(model.parameters()), torch.ones(1, 1, device=case.device)
    recording = Recording() if on_gpu else Update.one_at_a_time

    def closure(images: Tensor, labels: Tensor) -> Tensor:
        with case.autocast():
            loss = F.cross_entropy(network(images), labels)
        loss.backward()
        return loss

    for update in range(updates):
        losses, _ = recording(Update(None, no_mask, [loader.next()], parameters, closure))
        if extra is not None:
            extra()
        optimizer.step()
        if update >= updates - last:
            total += losses[0]
    return float(total) / max(last, 1)


def scratch(case: Case) -> Outcome:
    """A plain network from scratch, with the whole budget."""
    kind = case.setting["widths"]
    if kind == "whole":
        widths = case.whole
    elif kind == "uniform":
        widths = uniform(case.whole, case.limit(), lambda each: case.count(list(each))[str(case.cost)])
    elif case.parent is None:
        raise ValueError(f"the line of {case.setting['of']!r}, whose widths these are, is missing")
    elif kind == "found":
        widths = list(case.parent["widths"])
    elif kind == "macs":
        widths = uniform(case.whole, case.parent["counts"]["macs"], lambda each: case.count(list(each))["macs"])
    else:
        raise ValueError(f"widths are whole, uniform, found or macs, not {kind!r}")
    model, loader = case.place(case.start(widths)), case.loader()
    loss = train(case, model, loader, case.budget.optimizer(model.parameters()), case.budget.updates)
    if case.setting.get("recalibrate"):
        recalibrate(model, loader)
    return Outcome(model, loss, loader.read)


def shaped(case: Case, model: nn.Module | None = None) -> Outcome:
    """Ours: trained and shaped in one loop, from scratch or from a trained model, which is on the CPU."""
    samples, recipe = case.setting["samples"], recipe_of(case.setting)
    goal: dict[str, Any] = {"cost": case.cost, "target": case.target}
    if case.parent is not None:
        goal = {"target": {kind: case.parent["shares"][kind] for kind in ("macs", "weights")}}
    # Gates are found and verified in float32 on the CPU, before the model is moved.
    start = case.start(case.whole) if model is None else model
    gated = espalier.attach(start, next(case.images.evaluated(4))[0].cpu().contiguous())
    case.place(gated.model)
    loader = case.loader(samples)
    blind = Blind(case.setting["permute"], case.seed) if case.setting.get("permute") else None
    with case.autocast():
        result = espalier.fit(
            gated,
            loader,
            loss=F.cross_entropy,
            epochs=case.budget.epochs,
            **goal,
            batch_size=loader.batch,
            samples=samples,
            optimizer=case.budget.optimizer,
            seed=case.seed,
            quiet=True,
            recipe=recipe,
            compile=True if case.compile else None,
            callbacks=[] if blind is None else [blind],
        )
    if blind is not None and not blind.told:
        raise RuntimeError("the search was not made blind, so this run is no control")
    if result.updates != case.budget.updates:
        raise RuntimeError(f"fit made {result.updates} updates, not {case.budget.updates}")
    return Outcome(case.place(result.model), float(result.history[-1]["loss"]), loader.read)


def finetuned(case: Case) -> Outcome:
    """Ours on a trained network: trained whole for a share of the updates, then trained on and shaped.

    The trained network is the same for every size: a process trains it once, and counts its seconds in each run."""
    dense, anneal = case.setting["dense"], case.setting["anneal"]
    first = round(dense * case.budget.updates)
    key = (case.network, case.narrow, case.seed, case.budget, dense, anneal, case.compile)
    if key not in case.trained:
        began, model, loader = time.perf_counter(), case.place(case.start(case.whole)), case.loader()
        span = first if anneal else case.budget.updates
        train(case, model, loader, case.budget.optimizer(model.parameters(), span), first)
        model.cpu().to(memory_format=torch.contiguous_format)
        case.trained[key] = model, loader.read, time.perf_counter() - began
        spared = 0.0
    else:
        spared = case.trained[key][2]
    model, read, _ = case.trained[key]
    epochs = max(round(case.budget.epochs * (1 - dense)), 1)
    rest = replace(case.budget, epochs=epochs, updates=case.budget.updates - first)
    outcome = shaped(replace(case, budget=rest), copy.deepcopy(model))
    return outcome._replace(read=read + outcome.read, spared=spared)


def permuted(search: Any, among: str, seed: int) -> Any:
    """Make a search blind: what it is told no longer belongs to what it asked.

    Losses are permuted among the masks; slopes, and all else that is given for each gate, by one permutation among the
    gates of each group (``among="group"``) or among all gates ("all"). By a generator of its own, anew in each update.
    """
    if among not in ("group", "all"):
        raise ValueError(f"a signal is permuted among 'all' gates or those of each 'group', not {among!r}")
    tell, generator, d = search.tell, torch.Generator().manual_seed(seed + 1_000_003), search.space.d
    parts = [slice(0, d)] if among == "all" else list(search.space.slices.values())

    def blind(masks: Tensor, losses: Tensor, *more: Tensor | None, **named: Tensor | None) -> None:
        order = torch.randperm(losses.shape[-1], generator=generator).to(losses.device)
        places = torch.arange(d)
        for part in parts:
            places[part] = places[part][torch.randperm(len(places[part]), generator=generator)]

        def moved(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[..., places.to(values.device)]

        tell(masks, losses[..., order], *map(moved, more), **{name: moved(values) for name, values in named.items()})

    search.tell = blind
    return search


class Blind(espalier.Callback):
    """Makes the search of a run blind before its first update, and counts how often it was told something since."""

    def __init__(self, among: str, seed: int) -> None:
        self.among, self.seed, self.told = among, seed, 0

    def on_begin(self, loop: Any) -> None:
        search = permuted(loop.engine.search, self.among, self.seed)
        blind = search.tell

        def counted(*args: Any, **named: Any) -> None:
            self.told += 1
            blind(*args, **named)

        search.tell = counted


def by_peer(name: str) -> Callable[[Case], Outcome]:
    """A method of ``evidence_peers.py``, whose libraries the others do not need."""

    def method(case: Case) -> Outcome:
        import evidence_peers

        outcome: Outcome = getattr(evidence_peers, name)(case)
        return outcome

    return method


METHODS: dict[str, Callable[[Case], Outcome]] = {
    "shaped": shaped,
    "finetuned": finetuned,
    "scratch": scratch,
    "pruned": by_peer("pruned"),
    "oto": by_peer("oto"),
}


@torch.no_grad()
def evaluate(model: nn.Module, images: Images) -> tuple[float, float]:
    """The share of wrong classes and the mean loss on the evaluated part, in float32."""
    model.eval()
    wrong, loss = torch.zeros((), device=images.device), torch.zeros((), device=images.device)
    for batch, labels in images.evaluated():
        logits = model(batch)
        wrong += (logits.argmax(1) != labels).sum()
        loss += F.cross_entropy(logits, labels, reduction="sum")
    return float(wrong) / len(images.test_labels), float(loss) / len(images.test_labels)


def run(case: Case) -> dict[str, Any]:
    """Train and measure; what a line says beside its key."""
    began = time.perf_counter()
    model, train_loss, read, spared = METHODS[case.setting["method"]](case)
    if case.device.type == "cuda":
        torch.cuda.synchronize(case.device)
    seconds = time.perf_counter() - began + spared
    error, loss = evaluate(model, case.images)
    whole, counts = case.count(), count(model, case.images.shape)
    return {
        "error": error,
        "loss": loss,
        "train_loss": train_loss,
        "shares": {kind: counts[kind] / whole[kind] for kind in counts},
        "counts": counts,
        "widths": widths_of(model),
        "seconds": round(seconds, 2),
        "updates": case.budget.updates,
        "examples_read": read,
        "setting": complete(case.setting),
    }
