"""A torch optimiser that shapes the network while it trains it: for loops of one's own, and ours; what makes one by a
recipe, ``espalier.shape``; and what comes out."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from espalier.compact.apply import uncompiled
from espalier.cost import Cost
from espalier.data import Dataset
from espalier.gates.attach import attach
from espalier.gates.blocks import RoundTo
from espalier.gates.gated import Gated as Attached
from espalier.gates.recalibrate import recalibrate_under
from espalier.gates.verify import isolated_random
from espalier.search import Search
from espalier.space import BadInput, BadType, Diverged
from espalier.space import whole_number as whole
from espalier.train import checks, descent, feed, fingerprint, pytree, recipes, scoring, targets
from espalier.train import ranks as processes
from espalier.train.descent import Constant, Optimizer, Schedule
from espalier.train.gradients import Gated, Gradient, Update, not_finite, only_finite, skips, step_unless
from espalier.train.ranks import Ranks
from espalier.train.recipes import OptimizerFactory, Phases, Recipe
from espalier.train.result import Result, Row, Shares, rows, sizes
from espalier.train.scoring import Loss, Metrics
from espalier.train.settled import Settled, moved, widened
from espalier.train.targets import Target

NO_MASK = torch.ones(1, 1)  # of a compact network: one call of the closure, and no mask to draw
LOOK = 100  # updates between two looks whether a run on a GPU has diverged


class StructureOptimizer(torch.optim.Optimizer):
    """Wraps any torch optimiser: ``step(closure)`` is one update of the weights and of theta.

    :func:`espalier.shape` makes one that carries a recipe: which updates train the whole network, which search, and
    when the structure settles. Made by hand, without ``phases``, all of that is left to the caller.

    The closure is called once for each mask, with the model masked; it computes the loss, goes backwards and returns
    it, and it may zero gradients. Gradients from before the step are dropped: what is to count goes backwards inside
    the closure. Parameters of the model that another optimiser holds get the mean over the masks, too; at those of
    another module the gradients of ``search.samples`` calls add up. All calls of one step must see the same mini-batch,
    unless the search learns from slopes (``search.reads_slopes``): then each may read examples of its own. The weights
    then take one step of the inner optimiser on the mean gradient, theta one step of the search. Where a loss is not
    finite the weights stay as they are; see docs/training.md. Once the search is settled there is one mask and the
    closure is called once: give it ``search.samples`` times as many examples for the same work.
    ``step(closure, inputs, targets)`` hands the closure what each mask reads: with slopes its own part of the batch,
    else all of it.

    Several processes (``ranks``): with ``parallel="data"`` each of them gives its share of the mini-batch, all of equal
    size; with "structure" each gives the same, whole mini-batch, and takes its share where there is one mask.
    BatchNorm takes the statistics of the whole batch. All of them come to the same theta and weights, bit for bit.

    Parameter groups and state are those of the inner optimiser, so learning rate schedulers work on either. To clip
    the mean gradient use ``optimizer.register_step_pre_hook`` of the inner one: it runs just before the weights move.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        search: Search,
        gated: Gated,
        *,
        phases: Phases | None = None,
        asked: targets.Asked | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """phases: of the updates; None leaves them to the caller. asked: what size they are to end at, where that was
        read. scheduler: stepped after every update. ranks: that train together."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadType(f"optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if _calls_closures(optimizer):
            raise BadInput(
                f"{type(optimizer).__name__} calls the closure by itself, as often as it likes; use SGD, Adam or "
                "another first-order one. The two passes of SAM go into the closure: backward, move the weights, zero, "
                "backward again, move them back"
            )
        if not isinstance(search, Search) or not hasattr(gated, "space"):
            wrong = search if not isinstance(search, Search) else gated
            raise BadType(f"after the optimizer come a Search and a gated model, not {type(wrong).__name__}")
        if search.batch:
            raise BadInput(f"this search holds a batch of runs {search.batch}; one optimiser trains one run")
        if search.space != gated.space:
            raise BadInput(f"the search is over {search.space!r}, the gated model's space is {gated.space!r}")
        check_parameters(optimizer, gated.model)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner, self.search, self.gated = optimizer, search, gated
        self.phases, self.asked, self.scheduler = phases, asked, scheduler
        self.update = 0  # updates so far
        self.corrections = 0  # how often a measured cost asked for a smaller network
        self.errors: dict[str, float] = {}  # by measured cost: measured over predicted, when it last did
        self.settled: Settled | None = None
        self.multiple = 1  # what `settle` gives to `compact`
        self.padded: Tensor | None = None  # the mask of the network that is trained, if it is wider than what ships
        self.ranks = ranks
        # The mean over processes that train the same model.
        self.across: Callable[[Tensor], Tensor] | None = None if ranks is None else ranks.mean
        self._lost: Tensor | None = None  # of the updates since the last check: 1 for one that had no finite loss
        self._others: dict[str, int] | None = None  # versions of parameters that this optimiser does not hold
        self._masks = False  # whether the closure was seen to run under them
        self._moves = False  # whether the optimiser was seen to move the settled network, or named
        self._known: tuple[nn.Module, set[int], list[Tensor]] | None = None  # see _beside
        self._stepped = self._counted = 0  # steps of the inner optimiser, and those of them that were updates
        optimizer.register_step_post_hook(self._count)
        search.record()
        self._share()

    def _count(self, *_: Any) -> None:
        self._stepped += 1

    def _share(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self._groups = len(self.param_groups)  # those that were looked at
        if self.scheduler is not None:
            descent.follow(self.scheduler)

    @cached_property
    def shares(self) -> Shares:
        """What a mask keeps of the gates, the weights and the cost."""
        return Shares(self.gated, self.search.cost, self.search.device)

    @property
    def network(self) -> nn.Module:
        """What the closure is to run: the model, or once settled the compact network."""
        return self.gated.model if self.settled is None else self.settled.small

    @property
    def phase(self) -> str:
        """ "whole" before the search begins, then "searching", and "settled" once the structure is fixed."""
        if self.search.settled:
            return "settled"
        return "whole" if self.phases is not None and self.update < self.phases.begin else "searching"

    def row(self, epoch: float) -> Row:
        """Where the run stands, with the names that rows of a history have."""
        columns = self.shares(self.gated.canonical(self.search.select())) | self.search.summary()
        return {
            "epoch": epoch,
            "update": self.update,
            "begun": self.phases is None or self.update > self.phases.begin,
            "settled": self.search.settled,
            **rows(columns)[0],
            "learning_rate": float(self.param_groups[0]["lr"]),
        }

    def settle(self) -> None:
        """Fix the structure, and go on with the compact network where the gates know how to cut."""
        self.corrections, self.errors = targets.correct(self.search, self.gated)
        self.search.settle()
        if hasattr(self.gated, "plan"):  # a handle of one's own may know no plan, and goes on masked
            self.compact(self.multiple)

    def step(  # type: ignore[override]
        self,
        closure: Callable[..., Tensor | float] | None = None,
        *batch: Any,
        under: Tensor | None = None,
        together: Callable[[Update], Gradient] | None = None,
    ) -> Tensor:
        """One update. Returns the mean loss over the masks whose loss is finite, a scalar tensor.

        batch: what the closure is called with: tensors, tuples or dicts with examples first; nothing if it needs none.
        under: a mask ``(d)``; the weights alone take a step, under this mask, and theta rests. To train the whole
        network before the search begins: ``step(closure, under=search.whole())``.
        together: computes the gradient in another way than one mask at a time, as ``fit`` does; see ``OnePass``.
        """
        if closure is None:
            raise BadInput("step needs a closure that computes the loss, goes backwards and returns it: step(closure)")
        if self.phases is not None and under is None:
            if self.update >= self.phases.settle and not self.search.settled:
                self.settle()
            if self.update == self.phases.end and self.scheduler is not None:
                way = "give as many as you make, or an optimizer with a rate of its own"
                warnings.warn(f"the schedule has ended, after updates={self.update}: {way}", stacklevel=3)
            under = self.search.whole() if self.phase == "whole" else None
        if self._stepped != self._counted and self._counted >= 0:
            self._counted = -1  # it is said once
            said = "the inner optimiser is stepped on its own, too: leave that out, step(closure) moves the weights"
            warnings.warn(said, stacklevel=3)
        # Some were added to the inner optimiser; or it was given a state by itself, and has made itself new ones.
        if len(self.param_groups) != self._groups or self.param_groups is not self.inner.param_groups:
            check_parameters(self.inner, self.network)
            self._share()
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        beside = self._beside(held)
        parameters, before = [*held, *beside], [parameter.grad for parameter in beside]
        if self._others is None:
            self._others = self._versions()
        rests = under is not None or self.search.settled
        if self.settled is not None and under is not None:
            raise BadInput("a compact network is trained now, which takes no mask: step(closure) without `under`")
        masks = NO_MASK if self.settled is not None else self.search.ask() if under is None else under.unsqueeze(0)
        reads_slopes = self.search.reads_slopes and not rests
        parts = pytree.split(batch, self.search.samples) if reads_slopes and batch else [batch]
        masks_now, across = masks[:1] if rests else masks, self.across
        apart = None  # which masks are this rank's own
        if self.ranks is not None and self.ranks.parallel == "structure":
            if rests:
                parts = [self.ranks.share(batch) if batch else batch]
            else:
                apart, across = self.ranks.rows(len(masks)), None
                masks_now, parts = masks[apart], parts if len(parts) == 1 else parts[apart]
        gated = self.gated if self.settled is None else None
        skipping = skips(self.inner)
        update = Update(gated, masks_now, parts, parameters, closure, reads_slopes, across, skipping, self.search.even)
        about = self.search.generator.initial_seed(), self.update
        with nullcontext() if self.ranks is None else self.ranks.computing(*about, sharing=apart is None):
            if together is not None:
                losses, sized = together(update)
            elif rests or reads_slopes or self._masks or self.ranks is not None or not isinstance(gated, Attached):
                losses, sized = update.one_at_a_time()
            else:
                losses, sized = self._seen_masked(gated, update)
        if all(parameter.grad is None for parameter in held) and bool(losses.isfinite().all()):
            way = "run the compact network, as .network and compact() give it" if self.settled else "go backwards"
            raise BadInput(f"no gradient has reached what this optimiser trains: the closure has to {way}")
        told: list[Tensor | None] = list(sized or ())  # slopes and spreads
        if apart is not None:
            assert self.ranks is not None
            losses = self.ranks.placed(losses, apart, len(masks))
            told = [one if one is None else self.ranks.placed(one, apart, len(masks)) for one in told]
            if not skipping:
                only_finite(parameters, losses)  # also where the masks of another rank are the cause
        none_finite, some_not = not_finite(losses)
        mean = self._noted(losses, none_finite)
        if not rests:
            try:
                self.search.tell(masks, losses, *(one if one is None else one.to(self.search.device) for one in told))
            except Diverged:
                self.check(batch)  # which names the update
                raise
        last = self.phases is not None and self.update + 1 == self.phases.end
        if not losses.is_cuda or last or (self.update + 1) % LOOK == 0:
            self.check(batch)
        if self.ranks is not None:
            self.ranks.add_up(parameters, 1 / self.ranks.count if apart is None else len(masks_now) / len(masks))
        for parameter, grad in zip(beside, before):  # that optimiser may add up several updates
            if grad is not None:
                parameter.grad = grad if parameter.grad is None else grad + parameter.grad
        if self.settled is not None:
            self.settled.name_what_is_missed()
        move = partial(step_unless, some_not, self.inner) if skipping else self.inner.step
        if self._moves or self.settled is None:
            move()
        else:
            self._moves = moved(move, held, self.param_groups, losses)
        self._counted = self._stepped if self._counted >= 0 else -1
        # Inside an autocast region torch keeps the weights it has cast; they have just changed.
        torch.clear_autocast_cache()
        self.update += 1
        if self.scheduler is not None:
            self.scheduler.step()
        return mean

    def _seen_masked(self, gated: Attached, update: Update) -> Gradient:
        """The gradient of the first update under masks, whose losses would not show that the closure runs without them.
        Where the model has not run as it is, a mask with slopes tells whether what has run reads it."""
        with gated.watched() as ran:
            gradient = update.one_at_a_time()
        left = [parameter.grad for parameter in update.parameters]
        self._masks = ran()
        if ran() or all(one is None for one in left):  # as of a loss that is not finite
            return gradient
        with isolated_random():
            try:
                replace(update, slopes=True).one_at_a_time(update.masks[:1], update.parts[:1])
            except BadInput as error:
                raise BadInput(
                    "the closure does not run the masked model: what torch.compile made before gates were attached "
                    "knows none; run .network"
                ) from error
        for parameter, one in zip(update.parameters, left):
            parameter.grad = one
        self._masks = True
        return gradient

    def compact(self, multiple: int = 1, *, padded: Tensor | None = None) -> torch.nn.Module:
        """Once the search is settled: train on with the compact network, and return it.

        From here on the closure runs that network instead of the model. This optimiser holds its parameters, with the
        state they had. ``write_back`` brings what was trained into the model, for ``gated.compact`` and for saving.
        multiple: 8 on a GPU: the network is trained with zeros beside its channels, up to multiples of so many, which
        kernels are faster at. They stay zeros where the optimiser moves each number by its own gradient and value, and
        what ships has none. Groups where that is not exact are left. padded: the mask of it, as a state has kept it.
        """
        if not self.search.settled:
            raise BadInput("compact() goes on with the structure that was settled on: call search.settle() first")
        if self.settled is None:
            now, before = self._versions(), self._others or {}
            if moved := [name for name, version in now.items() if before.get(name, version) != version]:
                warnings.warn(
                    f"{moved[0]} is moved by something else than this optimiser, and stands still from here on: build "
                    "an optimiser of its own anew, of the parameters of the compact network, .network",
                    stacklevel=3,
                )
            named = self.gated.model.named_parameters()
            if hooked := [name for name, own in named if own._backward_hooks or own._post_accumulate_grad_hooks]:
                warnings.warn(
                    f"{hooked[0]} has hooks, which do not go over to the compact network: register them anew on the "
                    "parameters of .network",
                    stacklevel=3,
                )
            gated, mask = cast(Attached, self.gated), self.search.select()
            self.padded = widened(gated, mask, multiple) if padded is None and multiple > 1 else padded
            wider = None if self.padded is None else gated.plan(self.padded)
            self.settled = Settled(gated.model, gated.plan(mask), wider)
            self.settled.take_over(self.inner)
        return self.settled.small

    def _beside(self, held: Sequence[Tensor]) -> list[Tensor]:
        """What another optimiser may train of the network: gradients there are those of the same update."""
        network, known = self.network, {id(parameter) for parameter in held}
        if self._known is None or self._known[:2] != (network, known):
            self._known = network, known, [own for own in network.parameters() if id(own) not in known]
        return [parameter for parameter in self._known[2] if parameter.requires_grad]

    def _versions(self) -> dict[str, int]:
        """How often each parameter was changed in place that is trained, and that this optimiser does not hold."""
        held = {id(parameter) for group in self.param_groups for parameter in group["params"]}
        named = self.gated.model.named_parameters()
        return {name: own._version for name, own in named if own.requires_grad and id(own) not in held}

    def write_back(self) -> None:
        """Write the weights of the compact network into the model; nothing to do before :meth:`compact`."""
        if self.settled is not None:
            self.settled.write_back()

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the model is the whole network, with what was trained, also where it runs the compact one."""
        return nullcontext() if self.settled is None else self.settled.whole()

    def _noted(self, losses: Tensor, lost: Tensor | float) -> Tensor:
        """The mean of the finite losses. lost: whether there is none, which is noted for :meth:`check`."""
        if isinstance(lost, Tensor):
            if self._lost is None:
                self._lost, self._since = torch.zeros(LOOK, device=lost.device), self.update
            self._lost[self.update - self._since] = lost
        elif lost:
            self._lost, self._since = torch.ones(1), self.update
        if len(losses) == 1:
            return losses[0].clone()  # the closure may write over its own
        finite = losses.isfinite()
        return torch.where(finite, losses, 0.0).sum() / finite.sum()

    def check(self, batch: Any = ()) -> None:
        """Raise :class:`Diverged` if no loss of an update was finite. ``step`` does so by itself: on the CPU at once,
        on a GPU, which it does not wait for, every hundred updates. batch: what was read last, to be looked at."""
        noted, self._lost = () if self._lost is None else self._lost.tolist(), None
        if 1.0 in noted:
            update = self._since + noted.index(1.0) + 1
            total = "" if self.phases is None else f" of {self.phases.end}"
            raise Diverged(
                f"update {update}{total}: every loss of an update was infinite or not a number, after "
                f"{int(self.search.updates)} good updates of theta, which was left as it was. "
                f"{pytree.after_divergence(batch)}"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Of the optimiser and the search; keep the model's beside it, into which a compact network's weights are
        written first."""
        self.write_back()
        blocks = getattr(self.gated, "blocks", None)  # which units, by the weights of their time
        return {
            "inner": self.inner.state_dict(),
            "search": self.search.state_dict(),
            "compact": self.settled is not None,
            "update": self.update,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            **({"blocks": blocks} if blocks else {}),
            **({} if self.padded is None else {"padded": self.padded.tolist()}),
            **({"weights": fingerprint.weights(self.settled.small.parameters())} if self.settled is not None else {}),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the model first: where the state is of a compact network, it is cut out of the model as it is now."""
        if state_dict.keys() - {"blocks", "padded", "weights"} != {"inner", "search", "compact", "update", "scheduler"}:
            raise BadInput(
                "the state of a StructureOptimizer holds inner, search, compact, update and scheduler, not "
                f"{sorted(state_dict)}; a state of its inner optimiser alone goes into .inner"
            )
        if self.settled is not None:
            raise BadInput("this optimiser trains a compact network already; load into a new one")
        blocks = getattr(self.gated, "blocks", None)
        if state_dict.get("blocks", blocks) != blocks:
            raise BadInput(
                'this state is of gates on other blocks of units: attach with its own, as round_to=state["blocks"]'
            )
        self.search.load_state_dict(state_dict["search"])
        if state_dict["compact"]:
            kept = state_dict.get("padded")
            padded = None if kept is None else torch.tensor(kept, device=self.search.device)
            weights = fingerprint.weights(self.compact(padded=padded).parameters())
            if state_dict.get("weights", weights) != weights:
                warnings.warn(
                    "the model holds other weights than this state was kept with, and goes on from them: load the "
                    "model before the state, and save it after state_dict() or write_back()",
                    stacklevel=2,
                )
        self.inner.load_state_dict(state_dict["inner"])
        self._share()
        self.update, self._lost = int(state_dict["update"]), None
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])

    def finish(
        self, data: Any, *, loss: Loss | None = None, validation: Any = None, metrics: Metrics = None, **about: Any
    ) -> Result:
        """The result, as of ``fit``: the mask that ships, BatchNorm's statistics under it, and the compact model. The
        state of the run is not changed by it, but for the running statistics, which are of that mask from here on.

        data: to estimate those statistics on, in any form of ``fit``. loss, validation, metrics: to score it by.
        about: further fields of the result; ``finished=False`` to look at what would ship in the middle of a run.
        """
        search, gated = self.search, self.gated
        if self.phases is not None:
            if self.update < self.phases.settle and not search.settled and "finished" not in about:
                warnings.warn(
                    f"the structure has not settled after {self.update} of {self.phases.end} updates: these weights "
                    "were never trained under it alone; make all of them, or say that there will be fewer",
                    stacklevel=2,
                )
            about = {"finished": self.update >= self.phases.end} | about
        self.check()
        self.write_back()
        dtype = pytree.dtype(gated.model)
        reading = data if isinstance(data, feed.Feed) else feed.read(data, 1, 0, dtype)
        selected = search.select()
        mask = gated.canonical(selected)
        recalibrate_under(gated, mask, reading.once())
        model = gated.compact(mask).eval()
        score = None
        if validation is not None:
            if not isinstance(validation, feed.Feed):
                validation = feed.read_held_out(validation, 512, dtype, data if isinstance(data, Dataset) else None)
            score = scoring.evaluate(model, validation, loss=loss or nn.functional.cross_entropy, metrics=metrics)
        measured = targets.measured_again(search, gated, model, mask, self.errors)
        if measured:
            latencies = [row | {"corrections": self.corrections} for row in measured]
            tightest = max(latencies, key=lambda row: row["compared"] / row["most"])
            about |= {"latency": tightest, "latencies": tuple(latencies)}
        own: dict[str, Any] = {
            "history": [],
            "finished": True,
            "seconds": 0.0,
            "examples": reading.probe(model),
        } | about
        return Result(
            model=model,
            mask=mask,
            theta=search.theta.clone(),
            target=None if search.target is None else float(search.target),
            share_before=float(search.cost(search.mode()) / search.full_cost),
            share_after=float(search.cost(selected) / search.full_cost),
            shares=rows(self.shares(mask))[0],
            sizes=sizes(gated, mask.unsqueeze(0))[0],
            cost="" if self.asked is None else self.asked.name,
            validation=score,
            penalty=float(search.penalty),
            updates=self.update,
            space=gated.space,
            explanation=gated.explain(mask) if hasattr(gated, "explain") else "",
            order=getattr(gated, "flow", ()),
            inputs=reading.prepared,
            search=search,
            gated=gated,
            **own,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not hasattr(self, "inner"):  # while torch builds this object from the inner groups
            super().add_param_group(param_group)
            return
        self.inner.add_param_group(param_group)
        try:
            check_parameters(self.inner, self.network)
        except BadInput:
            self.inner.param_groups.pop()
            raise
        self._share()

    def __getstate__(self) -> dict[str, Any]:  # torch's leaves out everything but the groups
        raise BadType("a StructureOptimizer is neither copied nor pickled; keep its state_dict(), beside the model's")

    def __repr__(self) -> str:
        return f"StructureOptimizer({self.inner!r}, d={self.search.space.d})"


def _calls_closures(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step needs a closure: by its signature, as of LBFGS, or as the common class for SAM does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    needed = closure is not None and closure.default is inspect.Parameter.empty
    return needed or all(hasattr(optimizer, name) for name in ("first_step", "second_step"))


def check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Refuse an optimiser that trains something else than this model's parameters."""
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not held:
        raise BadInput("the optimizer holds no parameters")
    other = [tuple(parameter.shape) for parameter in held if id(parameter) not in known]
    if other:
        raise BadInput(
            f"the optimizer holds {len(other)} of {len(held)} parameters that are not the model's, the first of shape "
            f"{other[0]}; build it from the parameters of the model that is trained, after it was moved or rebuilt; "
            "others, as those of a loss, need an optimiser of their own"
        )


# ---- by a recipe -----------------------------------------------------------------------------------------------------


def shape(
    model: nn.Module | Gated,
    example: Any = None,
    optimizer: torch.optim.Optimizer | Optimizer | OptimizerFactory | None = None,
    *,
    updates: int,
    target: Target | None = None,
    penalty: float | None = None,
    cost: str | Cost | Tensor | Sequence[float] = "weights",
    samples: int | None = None,
    round_to: RoundTo | None = None,
    kinds: Collection[str] | None = None,
    ignore: Collection[str] = (),
    schedule: str | Schedule | None = None,
    recipe: str | Recipe | None = None,
    settle: float | None = None,
    seed: int = 0,
    parallel: str | Ranks | None = None,
) -> StructureOptimizer:
    """Everything ``fit`` does with the structure, for a loop of your own.

    model: a module, to which gates are attached, or what :func:`espalier.attach` gave.
    example: inputs to attach with; a tensor, a tuple (positional arguments) or a dict (keyword arguments).
    optimizer: of the model's parameters: a torch optimiser, or a function or settings as in ``fit``; default: as in
        ``fit`` where targets are classes, with the recipe's schedule. For other targets give ``AdamW(0.01)``.
    updates: how many there will be; begin, ramp and settle are shares of them.
    parallel: with several processes, "data" or "structure"; see :class:`StructureOptimizer`. All of them start with the
        weights of the first.
    Everything else is as in :func:`espalier.fit`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> x, y = torch.randn(16, 4), torch.arange(16) % 2
    >>> shaping = shape(model, x[:4], target=0.5, updates=10)
    >>> for _ in range(10):
    ...     def closure(inputs, targets):
    ...         loss = nn.functional.cross_entropy(shaping.network(inputs), targets)
    ...         loss.backward()
    ...         return loss
    ...     loss = shaping.step(closure, x, y)
    >>> shaping.finish((x, y)).share_after <= 0.5
    True
    """
    if torch.is_inference_mode_enabled():
        raise BadInput("training needs gradients, which torch.inference_mode() forbids; call it outside of that")
    model = uncompiled(model)
    module = checks.module_of(model)
    several = processes.read(parallel)
    if several is not None:
        several.begin(module)
    own = recipes.chosen(recipe, settle, penalised=target is None)
    phases = own.phases(whole(updates, "updates", 1), target)
    if optimizer is None:
        optimizer = recipes.usual_optimizer(own, module)
    rates = descent.read_schedule(schedule, own.schedule, optimizer)
    inner = built(own.optimizer if optimizer is None else optimizer, module)
    scheduler = None if rates == Constant() else descent.of_torch(rates, inner, phases.end)
    masks = own.samples if samples is None else samples
    how = checks.attaching(round_to, kinds, ignore, attached=model is not module)
    with _attached(model, module, example, how) as gated:
        asked = targets.read(gated, cost, target)
        if several is not None:
            several.check(masks, [asked.name, *asked.limits])
        with checks.unreachable(gated, asked.name):
            search = Search(
                gated.space,
                cost=asked.cost,
                limits=asked.limits,
                penalty=penalty,
                samples=masks,
                seed=whole(seed, "seed", 0),
                device=next(module.parameters()).device,
                **own.search_arguments(gated.space, phases, asked.share),
            )
        if several is not None:
            several.agree(
                {
                    "space": gated.space.to_json(),
                    "phases": asdict(phases),
                    "target": repr(asked.share),
                    "full_cost": float(search.full_cost),
                    "penalty": penalty,
                    "seed": seed,
                    "samples": masks,
                    "recipe": asdict(own),
                    "optimizer": type(inner).__name__,
                }
            )
        return StructureOptimizer(inner, search, gated, phases=phases, asked=asked, scheduler=scheduler, ranks=several)


@contextmanager
def _attached(model: object, module: nn.Module, example: Any, how: Mapping[str, Any]) -> Iterator[Any]:
    """The gates that were given; else gates of our own, taken off again where what follows is refused."""
    if example is not None:
        device = next(module.parameters()).device
        # Gates are tried out on the example; numbers that are not finite are for the first update to name.
        example = pytree.each(lambda t: t.nan_to_num(0.0, 0.0, 0.0).to(device), example)
        checks.readable(module, example)
    if model is not module:
        yield model
        return
    if example is None:
        raise BadInput("shape needs some example inputs to attach gates with: shape(model, inputs[:4], ...)")
    gated = attach(module, example, **how)
    try:
        yield gated
    except BaseException:
        gated.detach()
        raise


def built(given: torch.optim.Optimizer | Optimizer | OptimizerFactory, module: nn.Module) -> torch.optim.Optimizer:
    """The optimiser of a module's parameters that was given: as it is, by settings, or by a function."""
    inner: Any = given
    if not isinstance(given, torch.optim.Optimizer):
        factory = given.torch if isinstance(given, Optimizer) else given
        if not callable(factory):
            raise BadType(
                f"optimizer is a function that is given the parameters, such as lambda p: torch.optim.AdamW(p, "
                f"lr=1e-3), not {type(factory).__name__}"
            )
        inner = factory([parameter for parameter in module.parameters() if parameter.requires_grad])
        if not isinstance(inner, torch.optim.Optimizer):
            raise BadType(f"the optimizer function gives a torch.optim.Optimizer, not {type(inner).__name__}")
    check_parameters(inner, module)
    return inner  # type: ignore[no-any-return]
