"""The engine of many runs at once: of one shape, from a factory and stacked weights to the compact model of each."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from espalier.data import Dataset
from espalier.files import clean
from espalier.gates.attach import attach
from espalier.gates.gated import Gated as Attached
from espalier.gates.recalibrate import Norm, recalibrate
from espalier.search import Search
from espalier.space import BadInput, BadType, Diverged
from espalier.train import checks, fingerprint, gradients, pytree, recipes
from espalier.train.batched.batch import Batch, Compute
from espalier.train.batched.chain import Chain, Named, chain_of
from espalier.train.batched.inputs import Given, Pair, Searched, Source, held_out, read_data
from espalier.train.batched.runs import Plan, Run
from espalier.train.batched.step import cross_entropy
from espalier.train.feed import Tensors
from espalier.train.fingerprint import Hashes
from espalier.train.loop import Engine, Loop, Stop
from espalier.train.pytree import Nested
from espalier.train.result import Result, Row, Shares, rows, sizes
from espalier.train.scoring import Score, evaluate
from espalier.train.settled import of_one_shape
from espalier.train.targets import read

# Builds an nn.Module, or a gated model; given the Run if it has a parameter of the name `run`.
Factory = Callable[..., Any]
NOTHING: Mapping[str, Any] = {}


class Gated(gradients.Gated, Protocol):
    """What a sweep asks of a gated model beyond that; see :func:`espalier.attach`."""

    def call(self, params_and_buffers: Named, mask: Tensor, *args: Any, **kwargs: Any) -> Any: ...


class BatchEngine(Engine):
    """Runs of equal shape, trained together: all search, or all have given masks.

    factory: builds the model of a run, given the run if it has a parameter of that name. validation: see ``held_out``.
    """

    runs: list[Run]
    gated: Gated

    def __init__(
        self,
        factory: Factory,
        data: Dataset | Pair,
        validation: Dataset | Pair | None,
        runs: Sequence[Run],
        plan: Plan,
        device: torch.device,
        compute: Compute,
    ) -> None:
        stored = read_data(data, torch.float32, plan.batch_size)
        targets, self.per_epoch = stored.targets, stored.updates
        self.factory, self.runs, self.plan, self.device = factory, list(runs), plan, device
        self.total = plan.updates or plan.epochs * self.per_epoch
        if plan.points is None:
            self.points: Sequence[int] = range(self.per_epoch, self.total + 1, self.per_epoch)
        else:
            self.points = points(self.total, plan.points, compute.updates_at_once)
        self.phases = plan.recipe.phases(self.total, runs[0].target)
        self.settle_at, self.stride = self.phases.settle, compute.updates_at_once
        # Gates are found by watching the model compute: what it computes of is to be finite, whatever the data are.
        self.example = pytree.each(lambda part: part.cpu().nan_to_num(0.0, 0.0, 0.0), stored.example())
        self.gated, params, fixed = stacked(factory, self.runs, self.example, device, plan.how)
        self.blocks = getattr(self.gated, "blocks", None) or None
        self._how = dict(plan.how) | ({"round_to": self.blocks} if self.blocks else {})
        one = {name: tensor[0] for name, tensor in (params | fixed).items()}
        self._check_classes(one, targets)
        usual = recipes.usual_optimizer(plan.recipe, self.gated.model, targets)
        optimizer = plan.optimizer or usual or plan.recipe.sgd
        plan = self.plan = replace(plan, optimizer=optimizer)
        dtype = next(iter(params.values())).dtype
        # The masks of a batch come from one generator: its seed is made of all that makes the batch.
        self.seed = zlib.crc32(json.dumps(plan.seeded_by or [run.describe() for run in runs]).encode())
        self.counted_by = ""  # the name of what a target or penalty counts
        self.search = self._search() if runs[0].searches else None
        gradient = plan.gradient
        self.batch = Batch(
            self.gated.call,
            params if gradient is None else gradient.pack(params),
            fixed,
            data=data,
            seeds=[run.seed for run in runs],
            source=self._source(),
            loss=plan.loss,
            optimizer=optimizer,
            schedule=plan.schedule,
            total=self.total,
            batch_size=plan.batch_size,
            samples=plan.samples,
            begin=self.phases.begin,
            rates=torch.tensor([run.learning_rate or optimizer.lr for run in runs], dtype=dtype, device=device),
            pad=plan.pad,
            compute=compute,
            chain=None if fixed else self._chain(one),
            gradient=gradient,
            channels=self.gated.channels.on(device) if hasattr(self.gated, "channels") else None,
            even=0.0 if self.search is None else self.search.even,
        )
        self.stored, held = self.batch.feed.stored, held_out(validation, data, dtype)
        if held is not None:
            self._check_classes(one, held.targets)
        self.validation = None if held is None else held.to(device)
        cost = read(self.gated, plan.cost, None).cost if self.search is None else self.search.cost
        self.shares = Shares(self.gated, cost, device)
        self.looked = False  # whether smaller networks would do, since the masks are fixed
        self.shipped: list[dict[str, Tensor]] | None = None  # of each run all tensors as it was measured last
        self._read = (stored.inputs, targets, stored.affine or ())

    def settings(self, hashes: Hashes) -> dict[str, Any]:
        """What the runs are of, for who may resume them: all data are hashed, and the weights they begin with."""
        held = self.validation
        parts = {"data": self._read} | ({"validation": (held.inputs, held.targets)} if held else {})
        about = self.plan.describe() | {"space": self.gated.space.to_json(), "settle_at": self.phases.settle}
        about |= {"blocks": self.blocks} if self.blocks else {}
        about |= {"device": self.device.type, "precision": self.batch.compute.precision}
        # The factory is called under the seed of each run, so the same call builds the same weights.
        built = fingerprint.weights(self.weights().values())
        return (
            about
            | {"model": f"{fingerprint.network(self.gated.model)} {built}"}
            | {
                name: [[str(t.dtype), *t.shape, hashes.tensors([t])] for t in pytree.tensors(part)]
                for name, part in parts.items()
            }
        )

    def _check_classes(self, one: Named, targets: Nested) -> None:
        """The default loss picks a class by comparison: one that is not there, or a number that is no class, would be
        trained on in silence. one: the tensors of a run."""
        is_tensor = isinstance(targets, Tensor) and isinstance(self.example, Tensor)
        if not is_tensor or self.plan.loss is not cross_entropy:
            return
        dtype = next(iter(one.values())).dtype
        example = self.example.to(self.device, dtype if self.example.is_floating_point() else None)
        with torch.no_grad():
            mask = torch.ones(self.gated.space.d, device=self.device, dtype=dtype)
            outputs = self.gated.call(one, mask, example)
        checks.scores(outputs, targets)
        checks.classes(targets, outputs.shape[-1])

    def _chain(self, one: Named) -> Chain | None:
        if self.plan.gradient is not None or self.blocks or not isinstance(self.example, Tensor):
            return None
        example = self.example.to(self.device, next(iter(one.values())).dtype)
        gates = [where for _, where in self.gated.space.bits]
        with torch.no_grad():
            return chain_of(self.gated.model, gates, self.gated.call, one, example)

    def _search(self) -> Search:
        each = [read(self.gated, self.plan.cost, run.target) for run in self.runs]
        self.runs = [replace(run, target=own.share) for run, own in zip(self.runs, each, strict=True)]
        asked = each[0]
        limits = {name: (cost, [own.limits[name][1] for own in each]) for name, (cost, _) in asked.limits.items()}
        self.counted_by = asked.name
        targets = None if self.runs[0].target is None else [run.target for run in self.runs]
        price: dict[str, Any] = {} if targets else {"penalty": [run.penalty or 0.0 for run in self.runs]}
        space = self.gated.space
        with checks.unreachable(self.gated, asked.name):
            return Search(
                space,
                cost=asked.cost,
                limits=limits,
                seed=self.seed,
                batch=(len(self.runs),),
                device=self.device,
                **price,
                **self.plan.search_arguments(space, self.phases, targets),
            )

    def _source(self) -> Source:
        if self.search is not None:
            return Searched(self.search, [run.permuted for run in self.runs])
        d = self.gated.space.d
        for run in self.runs:
            if run.mask is not None:
                self.gated.space.check_mask(run.mask)
        masks = torch.stack([torch.ones(d) if run.mask is None else run.mask.float().reshape(d) for run in self.runs])
        rates = torch.tensor([run.dropout or 0.0 for run in self.runs])
        if bool((rates > 0).any()) and self._alone:
            raise BadInput(
                "dropout draws a mask for each example, which batch statistics cannot follow; this model has BatchNorm"
            )
        # A network of its own is trained as it ships: without the gates that its dead parts would be read through.
        canonical = self.gated.canonical(masks)
        return Given(canonical.to(self.device), rates.to(self.device), self.seed)

    def masks(self) -> Tensor:
        """What would ship now, canonical: ``(R, d)``."""
        if self.search is not None:
            return self.gated.canonical(self.search.select())
        assert isinstance(self.batch.source, Given)
        return self.batch.source.mask

    # ---- on the way ------------------------------------------------------------------------------------------------

    @property
    def done(self) -> int:
        return self.batch.done

    @property
    def settled(self) -> bool:
        return self.search is None or self.search.settled

    @property
    def phase(self) -> str:
        return "settled" if self.settled else "searching" if self.batch.begun else "whole"

    @property
    def thetas(self) -> Tensor | None:
        return None if self.search is None else self.search.theta

    def advance(self, updates: int, stop: Stop) -> None:
        if self.settled and not self.looked:
            self._cut()
        self.network.train()
        self.batch.advance(updates)
        broken = self.batch.state.broken
        if bool((broken >= 0).all()):  # one run that has diverged stops no other
            raise Diverged(
                f"update {int(broken.min())} of {self.total}: every loss of an update was infinite or not a number, of "
                f"every run by now. {pytree.after_divergence(self._read[:2])}"
            )

    @property
    def network(self) -> nn.Module:
        """What computes the runs: the model, or once their masks are fixed a smaller one."""
        return self.gated.model if self.batch.smaller is None else self.batch.smaller.small

    def _cut(self) -> None:
        """Go on with smaller networks where the masks allow it, on a CPU: a GPU would have to compile them."""
        self.looked = True
        source = self.batch.source
        if self.device.type != "cpu" or self.plan.gradient is not None or source.masks_each:
            return
        assert isinstance(source, Given)
        gated = self.judge if self._alone else self.gated  # with running statistics, as a plan has them
        if isinstance(gated, Attached) and (smaller := of_one_shape(gated, source.mask, self._trained())) is not None:
            strip(smaller.small)
            self.batch.cut(smaller)

    def settle(self) -> None:
        assert self.search is not None
        self.search.settle()
        self.batch.settle(self.masks())

    def measure(self, last: bool) -> list[Row]:
        self.network.eval()
        masks = self.masks()
        loss, error = self.batch.read_sums()
        columns = {"loss": loss, "error": error} | self.shares(masks)
        if self.search is not None:
            columns |= self.search.summary()
        scores = list[Score]()
        if self.validation is not None:
            loss, error, scores = self.evaluate(masks, self.validation, last)
            columns |= {"validation_loss": loss, "validation_error": error}
        columns["learning_rate"] = self.batch.learning_rates()
        head: Row = {"epoch": self.done // self.per_epoch, "update": self.done, "begun": self.batch.begun}
        measured = [head | {"settled": self.settled} | row for row in rows(columns)]
        for row, score in zip(measured, scores):
            row.update({f"validation_{name}": clean(value) for name, value in score.metrics.items()})
        return measured

    def reads(self, last: bool) -> int:
        held = 0 if self.validation is None else self.validation.n
        if not self._alone:
            return held + 1
        return held + (self.stored.n if last else min(self.plan.calibrate, self.stored.n))

    def _trained(self) -> dict[str, Tensor]:
        return self.batch.whole.params | self.batch.whole.fixed

    def keep(self, best: dict[str, Tensor] | None, better: Sequence[bool]) -> dict[str, Tensor]:
        if best is None:
            return {name: tensor.clone() for name, tensor in self._trained().items()}
        which = torch.tensor([run for run, now in enumerate(better) if now], device=self.device)
        for name, tensor in self._trained().items():
            best[name].index_copy_(0, which, tensor[which])
        return best

    def put_back(self, best: dict[str, Tensor]) -> None:
        self.shipped = None  # statistics of other weights
        self.batch.put_back(best)

    # ---- how good the runs are -------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """All tensors of the runs ``(R, ...)`` by the model's own names, however a step keeps them."""
        whole = self.batch.whole
        return self.batch.gradient.unpack(whole.params) | whole.fixed

    @property
    def _alone(self) -> bool:
        """Whether each run is evaluated by itself: running statistics of BatchNorm, which no run keeps while it trains,
        are estimated for each under its mask."""
        return any(isinstance(module, Norm) for module in self.gated.model.modules())

    def evaluate(self, masks: Tensor, held: Tensors, last: bool) -> tuple[Tensor, Tensor, list[Score]]:
        """Mean loss and share of wrong classes of each run under its mask ``(R, d)``, float64 ``(R)``; and the scores
        of runs that are evaluated by themselves, as for metrics."""
        scores = self._scores(masks, held, last) if self._alone or self.plan.metrics else []
        if not self._alone:
            return *self.batch.evaluate(masks, held.inputs, held.targets, read=held.read), scores
        numbers = [(score.loss, torch.nan if score.error is None else score.error) for score in scores]
        loss, error = torch.tensor(numbers, dtype=torch.float64, device=self.device).unbind(-1)
        return loss, error, scores

    def _scores(self, masks: Tensor, held: Tensors, last: bool) -> list[Score]:
        """One run after the other. Statistics of BatchNorm are the cumulative mean over some training inputs without
        augmentation, over all of them at the last measurement."""
        limit = self.stored.n if last else self.plan.calibrate
        scores, weights = list[Score](), self.weights()
        self.shipped = [] if self._alone else None
        for run in range(len(self.runs)):
            load(self.judge, weights, run)
            model = self.judge.model
            with self.judge.masked(masks[run].to(self.device)):
                if self._alone:
                    self._calibrate(model, limit)
                scores.append(self._score(model.eval(), held))
            if last and self.shipped is not None:
                self.shipped.append({name: t.detach().clone() for name, t in model.state_dict().items()})
        return scores

    @cached_property
    def judge(self) -> Gated:
        """A model that keeps running statistics; it is given the weights of one run after the other."""
        judge = build(self.factory, self.runs[0], self.example, self._how)
        judge.model.to(self.device)
        return judge

    def _calibrate(self, model: nn.Module, limit: int) -> None:
        with self.batch.compute.applied():
            recalibrate(model, self.stored.once(limit))

    def _score(self, model: nn.Module, held: Tensors) -> Score:
        with self.batch.compute.applied():
            return evaluate(model, held, loss=self.plan.loss, metrics=self.plan.metrics)

    # ---- what comes out --------------------------------------------------------------------------------------------

    def results(self, loop: Loop) -> list[Result]:
        search, state, masks = self.search, self.batch.state, self.masks()
        before = None if search is None else (search.cost(search.mode()) / search.full_cost).tolist()
        after = None if search is None else search.usage().tolist()
        penalty = None if search is None else search.penalty.tolist()
        shares, counts = rows(self.shares(masks)), sizes(self.gated, masks)
        results, weights, examples = list[Result](), self.weights(), self.stored.probe()
        for i, run in enumerate(self.runs):
            model = self._compact(weights, i, masks[i])
            score = None if self.validation is None else self._score(model, self.validation)
            broken = int(state.broken[i])
            results.append(
                Result(
                    model=model.cpu(),
                    mask=masks[i].cpu(),
                    theta=None if search is None else search.theta[i].cpu().clone(),
                    history=loop.histories[i],
                    finished=loop.finished,
                    target=run.target,
                    share_before=None if before is None else before[i],
                    share_after=None if after is None else after[i],
                    shares=shares[i],
                    sizes=counts[i],
                    cost=self.counted_by,
                    validation=score,
                    penalty=None if penalty is None else penalty[i],
                    updates=self.done,
                    seconds=loop.elapsed,
                    space=self.gated.space,
                    order=getattr(self.gated, "flow", ()),
                    run=run,
                    stopped=loop.stopped,
                    diverged=broken if broken >= 0 else None,
                    skipped=int(state.skipped[i]),
                    inputs=self.stored.prepared,
                    examples=examples,
                )
            )
        return results

    def _compact(self, weights: dict[str, Tensor], run: int, mask: Tensor) -> nn.Module:
        """What ships of a run under its canonical mask ``(d)``: in eval mode, on the runs' device."""
        if not self._alone:
            load(self.gated, weights, run)
            return self.gated.compact(mask.to(next(self.gated.model.parameters()).device)).to(self.device).eval()
        load(self.judge, weights, run)
        if self.shipped:
            self.judge.model.load_state_dict(self.shipped[run])
        else:  # in the same way as for a measurement, so that a run that is gone on with ends with the same bits
            with self.judge.masked(mask):
                self._calibrate(self.judge.model, self.stored.n)
        return self.judge.compact(mask).eval()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"batch": self.batch.state_dict()}
        if self.search is not None:
            state["search"] = self.search.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.search is not None:
            self.search.load_state_dict(state["search"])
        self.batch.load_state_dict(state["batch"])


def points(total: int, count: int, stride: int = 50) -> tuple[int, ...]:
    """Updates after which runs are measured: so many, evenly spaced, the last one the end.

    stride: updates in one CUDA graph; points are multiples of it where there is room.

    >>> points(937_500, 20)[:2], points(937_500, 20)[-1], points(7, 3)
    ((46850, 93750), 937500, (2, 5, 7))
    """
    exact = [round(total * k / count) for k in range(1, count + 1)]
    if total >= count * stride:
        exact = [point // stride * stride for point in exact[:-1]] + [total]
    return tuple(sorted({point for point in exact if point > 0}))


# ---- from a factory to stacked weights and back ----------------------------------------------------------------------


def made(factory: Factory, run: Run) -> Any:
    """What the factory builds under the seed of this run; torch's own random state stays as it was."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise BadType(
            f"factory is a function without arguments that builds the model, anew for every seed, such as "
            f"lambda: Net(), not {type(factory).__name__}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        found = factory(run) if takes_run(factory) else factory()
    if not isinstance(found, nn.Module) and not (hasattr(found, "call") and hasattr(found, "model")):
        raise BadType(f"factory() builds a module, or a gated model as espalier.attach gives it, not {found!r}")
    checks.module_of(found)
    return found


def takes_run(factory: Factory) -> bool:
    """Whether a factory builds for one run what it builds for no other of its seed."""
    try:
        return "run" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def attached(found: Any, example: Nested, how: Mapping[str, Any] = NOTHING) -> Gated:
    """A gated model as it is, or gates attached to a module. example: a few inputs as the network reads them. how: more
    for :func:`espalier.attach`."""
    if not isinstance(found, nn.Module):
        if how and how != {"round_to": getattr(found, "blocks", None)}:
            names = ", ".join(how)
            raise BadInput(f"the factory gives gates of its own; give {names} to espalier.attach, which makes them")
        return found  # type: ignore[no-any-return]
    device, dtype = next((p.device for p in found.parameters()), None), pytree.dtype(found)
    example = pytree.each(lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype), example)
    checks.readable(found, example)
    gated: Gated = attach(found, example, **how)
    return gated


def build(factory: Factory, run: Run, example: Nested, how: Mapping[str, Any] = NOTHING) -> Gated:
    """A gated model with the initial weights of this run."""
    return attached(made(factory, run), example, how)


def stacked(
    factory: Factory, runs: Sequence[Run], example: Nested, device: torch.device, how: Mapping[str, Any] = NOTHING
) -> tuple[Gated, Named, Named]:
    """A template that computes with any weights, the trained tensors ``(R, ...)`` and the fixed ones, by name.

    The template keeps no running statistics: while training, every mask of every run normalises with its own batch,
    and what ships is calibrated under its own mask at the end.
    """
    keys = list(range(len(runs))) if takes_run(factory) else [run.seed for run in runs]
    each = {key: made(factory, run) for key, run in dict(zip(reversed(keys), reversed(runs))).items()}
    template = attached(each[keys[0]], example, how)
    frozen = [name for name, m in template.model.named_modules() if isinstance(m, Norm) and not m.training]
    if frozen and template.model.training:
        raise BadInput(
            f"{frozen[0]} is BatchNorm in eval mode; a sweep normalises with batch statistics always and cannot keep "
            "frozen ones. Use espalier.fit, or put it into train mode"
        )
    strip(template.model)
    names = dict(template.model.named_parameters())
    # A mask is no tensor of a run: the call brings its own.
    buffers = [n for n, _ in template.model.named_buffers() if not n.rpartition(".")[2].startswith("espalier_")]
    modules = {key: checks.module_of(one) for key, one in each.items()}
    states = {key: dict(one.named_parameters()) | dict(one.named_buffers()) for key, one in modules.items()}

    def stack(name: str) -> Tensor:
        found = [states[key].get(name) for key in keys]
        shapes = {None if t is None else tuple(t.shape) for t in found}
        if len(shapes) > 1 or None in shapes:
            raise BadInput(f"factory() builds different models: {name} has shapes {sorted(map(str, shapes))}")
        return torch.stack([t.detach().to(device) for t in found if t is not None])

    params = {name: stack(name) for name, p in names.items() if p.requires_grad}
    fixed = {name: stack(name) for name in [*(n for n, p in names.items() if not p.requires_grad), *buffers]}
    template.model.to(device)  # what is not among these tensors is read from the template
    return template, params, fixed


def strip(model: nn.Module) -> None:
    """Let BatchNorm use batch statistics always; torch writes running ones in place, which no vmap can follow."""
    for module in model.modules():
        if isinstance(module, Norm):
            module.track_running_stats = False
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                setattr(module, name, None)


def load(gated: Gated, params: Named, run: int) -> None:
    """Write one run's weights and buffers into a model."""
    names = dict(gated.model.named_parameters()) | dict(gated.model.named_buffers())
    with torch.no_grad():
        for name, stack in params.items():
            names[name].copy_(stack[run])
