"""The search: a stochastic natural gradient over structures, with a penalty or a target on their expected cost."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.search import arguments, selection
from espalier.search.distribution import Distribution
from espalier.search.one_run import OneRun
from espalier.search.penalty import FLATTEST, Penalty, shared
from espalier.search.recorded import Recorded
from espalier.search.signal import Adaptation, Signal, of_losses
from espalier.space import (
    BadInput,
    BadMask,
    BadMaskType,
    BadType,
    Corrupt,
    Diverged,
    Space,
    Unreachable,
    first_line,
    whole_number,
)

CACHED = 1 << 18  # entries handled at a time on a CPU, so that what a step needs between passes stays in its cache


class Search:
    """Optimises the expectations ``theta`` of masks: ``ask`` for masks, ``tell`` their losses.

    One object holds any number of independent runs: ``batch=(R,)`` puts a leading dimension before everything.

    space: a number of bits, or an :class:`espalier.Space`.
    cost: what a mask costs, a 1-D tensor of c_i or an :class:`espalier.Cost`; None counts open bits.
    penalty: how strongly cost counts (eps'), a number or ``(*batch)``; negative grows structures.
    target: the share of the full cost to end at, instead of a penalty; needs ``horizon``, the updates of the run.
    limits: beside a target, by name, further costs and the shares of them that what ships never exceeds.
    samples: masks per update (lambda). learning_rate: of theta, default one over the degrees of freedom.
    initial: theta at the start. margin: theta of a bit stays in [margin, 1 - margin], default 1 / variables.
    adaptive: the step size follows ASNG; ``learning_rate`` is then its delta, default 1.
    signal: what theta learns from. "ranked": the order of the losses, as in the paper. "slopes": how strongly the loss
        depends on each gate, which ``tell`` is given beside the losses; one mask an update is then enough.
        "first-order": the slopes as they are, exact where the loss is linear in each gate. See docs/signal.md.
    ramp: the share of the horizon over which the expected cost goes to the target, in a straight line. Or a function of
        the share of the horizon that is gone: it gives the share of the way that is gone, from 0 to 1 and never back, a
        number or one for each run. A state does not hold it: to resume, give the same again.
    even: which gates the ramp closes: 0 by their cost, 1 all alike.

    >>> search = Search(20, penalty=0.1, seed=1)             # twenty bits, each open one costing the same
    >>> for _ in range(2000):
    ...     masks = search.ask()                             # (2, 20)
    ...     losses = (masks[:, :5] == 0).sum(1).float()      # only the first five help
    ...     search.tell(masks, losses)
    >>> search.select().int().tolist()
    [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    """

    def __init__(
        self,
        space: int | Space,
        *,
        cost: Cost | Tensor | Sequence[float] | None = None,
        penalty: float | Sequence[float] | Tensor | None = None,
        target: float | Sequence[float] | Tensor | None = None,
        limits: Mapping[str, tuple[Cost, object]] | None = None,
        horizon: int | None = None,
        samples: int = 2,
        learning_rate: float | Sequence[float] | Tensor | None = None,
        initial: float | Tensor = 0.5,
        margin: float | None = None,
        adaptive: bool = False,
        signal: str = "ranked",
        ramp: arguments.Ramp = 0.5,
        even: float = 0.0,
        seed: int = 0,
        batch: int | Sequence[int] = (),
        device: str | torch.device | None = None,
    ) -> None:
        self.space = Space.of(space)
        self.device = arguments.read_device(device)
        self.batch = arguments.batch_shape(batch)
        self.signal, self._signal = signal, Signal.start(signal, self.batch, self.device)
        fewest, why = (1, "") if self.reads_slopes else (2, ": the losses of an update are compared with each other")
        self.samples = whole_number(samples, "samples", fewest, why)
        self._distribution = Distribution(self.space, arguments.read_margin(margin), self.device)
        theta = arguments.read_initial(initial, self.space, self.batch, self.device)
        self._theta = self._distribution.bound(theta).expand(*self.batch, self.space.d).clone()
        if learning_rate is None:
            learning_rate = 1.0 if adaptive else 1 / self.space.freedom
        self.learning_rate = arguments.positive(self._numbers(learning_rate, "learning_rate"), "learning_rate")
        self._adaptation = Adaptation.start(self._theta) if adaptive else None
        if not isinstance(adaptive, bool):
            raise BadType(f"adaptive is True or False, not {adaptive!r}")
        even = arguments.read_even(even)
        self._penalty = self._read_penalty(cost, penalty, target, horizon, even)
        self._limits = self._read_limits(limits or {}, even)
        if self.target is None and not callable(ramp):
            arguments.read_part(ramp)
        if self.target is not None:
            way = arguments.read_ramp(horizon, ramp, self.batch, self.device)
            for one in self._bounds.values():
                one.start_ramp(self._theta, self._distribution.bound, way, limit=one is not self._penalty)
            sets = sorted(itertools.product((False, True), repeat=1 + len(self._limits)), key=sum)
            self._sets = torch.tensor(sets, device=self.device)  # of costs that may be pulled at together
        self.updates = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
        self.diverged = torch.zeros(self.batch, dtype=torch.bool, device=self.device)
        self._settled: Tensor | None = None
        self.generator = torch.Generator(self.device).manual_seed(whole_number(seed, "seed", 0))
        self._asked: weakref.ref[Tensor] | None = None
        self._draw, self._learn = self._distribution.draw, self._update
        self._recorded: Recorded | None = None
        runs = self._theta.numel() // self.space.d
        width = self.space.d
        if self.device.type == "cpu" and self.space.is_bits:
            width = max(CACHED // (runs * self.samples), 1024)
        self._parts = [slice(a, min(a + width, self.space.d)) for a in range(0, self.space.d, width)]
        self._one_run = OneRun.of(self)

    # What the run has come to

    @property
    def theta(self) -> Tensor:
        """The expectations of the mask ``(*batch, d)`` float64. The live tensor: clone it to keep it."""
        return self._theta

    @property
    def penalty(self) -> Tensor:
        """The eps' in force ``(*batch)``; with a target, the running mean of what was solved for."""
        return torch.zeros_like(self.learning_rate) if self._penalty is None else self._penalty.value

    @property
    def cost(self) -> Cost:
        return self._controlled.cost

    @property
    def target(self) -> Tensor | None:
        """The share of the full cost to end at ``(*batch)``."""
        return None if self._penalty is None else self._penalty.target

    @property
    def even(self) -> float:
        """How far the ramp closes gates alike instead of by their cost; 0 where there is none."""
        return 0.0 if self._penalty is None or self._penalty.target is None else self._penalty.even

    @property
    def full_cost(self) -> Tensor:
        """The cost of the most expensive structure."""
        return self._controlled.full_cost

    @property
    def reads_slopes(self) -> bool:
        """Whether ``tell`` needs slopes; its masks then need not share their examples."""
        return self._signal is not None

    @property
    def settled(self) -> bool:
        return self._settled is not None

    def mode(self) -> Tensor:
        """The most probable mask ``(*batch, d)``: a bit open where theta >= 0.5, a choice at its likeliest option."""
        return self._distribution.mode(self._theta)

    def select(self) -> Tensor:
        """What ships ``(*batch, d)``: the mode, with ``least`` respected; with a target the best mask by theta whose
        cost is at most the target, to which no further gate can be added."""
        if self._settled is not None:
            return self._settled.clone()
        if self.target is None:
            return selection.repaired(self._distribution, self._theta)
        bounds, main = [(one.cost, one.budget * one.tightened) for one in self._bounds.values()], self._controlled
        smallest = self._smallest if self._limits else main.smallest
        return selection.within(self._distribution, bounds, self._theta, main.full, smallest)

    def budgets(self) -> dict[str, tuple[Cost, Tensor]]:
        """By name, "target" and those of the limits, each cost and what it may be at most ``(*batch)``."""
        return {name: (one.cost, one.budget) for name, one in self._bounds.items()}

    def tighten(self, name: str, factor: float) -> bool:
        """Make ``select`` stay below a target or limit by a further factor, after a measurement above the prediction.

        name: of the target or limit, as in :meth:`budgets`. Goes down to the smallest structure, and returns whether
        there was anything left to go."""
        if (one := self._bounds.get(name)) is None:
            return False
        before, least = one.tightened, float((one.smallest_cost / one.budget).max())
        one.tightened = max(before * factor, min(before, least * (1 + 1e-12)))  # not missed by a last digit
        return one.tightened < before

    def whole(self, noise: Tensor | None = None) -> Tensor:
        """A mask ``(*batch, d)`` with every bit open, to train under before the search begins. Choices are drawn, from
        this noise or a new one."""
        if self.space.is_bits:
            return torch.ones_like(self._theta, dtype=torch.float32)
        mask = self.draw(self.noise() if noise is None else noise)[..., 0, :].clone()
        for _, where in self.space.bits:
            mask[..., where] = 1.0
        return mask

    def usage(self) -> Tensor:
        """Cost of ``select()`` over the full cost ``(*batch)``."""
        return self._controlled.cost(self.select()) / self.full_cost

    def expected_cost(self) -> Tensor:
        """The exact expectation of the cost under theta ``(*batch)``."""
        return self._controlled.cost(self._theta)

    def gap(self) -> Tensor:
        """How far the mode is from the target, before the selection, as a share of the full cost ``(*batch)``."""
        if self.target is None:
            raise BadInput("gap() needs a target, and this search has none")
        return self._controlled.cost(self.mode()) / self.full_cost - self.target

    def entropy(self) -> Tensor:
        """The mean entropy of a variable in bits ``(*batch)``: 1 for bits at 0.5, 0 when the structure is decided."""
        total: Tensor = torch.special.entr(self.theta).sum(-1)
        for _, where in self.space.bits:
            total = total + torch.special.entr(1 - self.theta[..., where]).sum(-1)
        return total / math.log(2) / self.space.n

    def summary(self) -> dict[str, Tensor]:
        """What theta says, ``(*batch)`` each; the distance to a target is NaN where there is none."""
        expected = self.expected_cost()
        return {
            "selected_share": self.usage(),
            "expected_share": expected / self.full_cost,
            "expected_cost": expected,
            "penalty": self.penalty,
            "entropy": self.entropy(),
            "distance_to_target": expected * torch.nan if self.target is None else self.gap(),
        }

    def check(self) -> None:
        """Raise :class:`Diverged` if a run met an update without any finite loss."""
        if bool(self.diverged.any()):
            which = f" in runs {self.diverged.nonzero().squeeze(-1).tolist()}" if self.batch else ""
            after = self.updates[self.diverged].flatten().tolist()
            raise Diverged(
                f"every loss of an update was infinite or not a number{which}, after {after} good updates; theta was "
                "left as it was. Lower the learning rate of the weights, or look at the data"
            )

    # The loop

    def ask(self) -> Tensor:
        """Masks ``(*batch, samples, d)`` float32, drawn from theta; the settled one repeated once settled."""
        shape = (*self.batch, self.samples, self.space.d)
        if self._settled is not None:
            masks = self._settled.unsqueeze(-2).expand(shape).clone()
        else:
            masks = self.draw(self.noise()) if len(self._parts) == 1 else self._draw_in_parts(shape)
        self._asked = weakref.ref(masks)
        self._asked_version = masks._version
        return masks

    def _draw_in_parts(self, shape: tuple[int, ...]) -> Tensor:
        masks = torch.empty(shape, dtype=torch.float32, device=self.device)
        for part in self._parts:
            noise = self._uniform(part.stop - part.start)
            self._distribution.draw(self._theta[..., part], noise, out=masks[..., part])
        return masks

    def tell(self, masks: Tensor, losses: Tensor, slopes: Tensor | None = None, spreads: Tensor | None = None) -> None:
        """One update of theta. masks: ``(*batch, samples, d)``, losses: ``(*batch, samples)``, lower is better.

        slopes: ``(*batch, samples, d)``, the derivative of each mask's loss by each of its entries, closed gates
            included. Needed by the signals that read them, and left alone by "ranked".
        spreads: of the same shape, the root mean square of the slopes of single examples, where they are known; without
            them the size of the slopes stands in.
        """
        self._check_told(masks, losses, slopes, spreads)
        if self._settled is not None:
            return
        alive = self.learn(masks, losses, slopes, spreads)
        if self.device.type == "cpu" and not self.batch and not bool(alive):
            self.check()

    # The same in parts, for a step that is compiled or captured: randomness apart, nothing looked at on the host

    def noise(self) -> Tensor:
        """The randomness of one ``ask``: ``(*batch, samples, n)`` float64, uniform in [0, 1)."""
        return self._uniform(self.space.n)

    def _uniform(self, variables: int) -> Tensor:
        # float64: in float32 a probability near the margin would be rounded for d in the millions
        shape = (*self.batch, self.samples, variables)
        return torch.rand(shape, dtype=torch.float64, device=self.device, generator=self.generator)

    def draw(self, noise: Tensor) -> Tensor:
        """The masks ``(*batch, samples, d)`` that this noise draws from theta."""
        return self._draw(self._theta, noise)

    def learn(
        self, masks: Tensor, losses: Tensor, slopes: Tensor | None = None, spreads: Tensor | None = None
    ) -> Tensor:
        """``tell`` without a look at what is told; not once settled. Returns whether a loss was finite ``(*batch)``."""
        if self.reads_slopes and slopes is None:
            raise BadInput(f"signal={self.signal!r} learns from slopes: tell(masks, losses, slopes)")
        if self._recorded is not None and losses.is_cuda:
            alive: Tensor = self._recorded(self._learn, masks, losses, slopes, spreads)
            if self._recorded.trouble:
                warnings.warn(f"theta's update is not recorded as a CUDA graph: {self._recorded.trouble}", stacklevel=2)
                self._recorded = None
            return alive
        if self._one_run is not None and slopes is not None:
            return torch.tensor(self._one_run(losses.item(), slopes, spreads))
        return self._learn(masks, losses, slopes, spreads)

    def record(self) -> None:
        """On a GPU, replay the update of theta as one CUDA graph, with the same numbers: it is some hundred small
        operations. Not inside a step that is recorded as a whole; losses, slopes and spreads keep their types."""
        if self.device.type == "cuda":
            self._recorded = Recorded()

    def compile(self) -> None:
        """Compile :meth:`draw` and :meth:`learn`. It takes seconds, once. On a GPU a search over many gates then takes
        one pass over theta instead of many. Not needed inside a step that is compiled as a whole. What torch cannot
        compile stays as it is, with a warning. A copy of the search is not compiled."""
        self._one_run = None
        self._draw, self._learn = _compiled(self._distribution.draw), _compiled(self._update)

    def _update(self, masks: Tensor, losses: Tensor, slopes: Tensor | None, spreads: Tensor | None) -> Tensor:
        losses = losses.detach().to(self.device)
        if self._signal is None or slopes is None:
            direction, alive = of_losses(masks, losses)
        else:
            values, alive = self._signal.values(self._distribution, self._theta, losses, slopes, spreads, self.updates)
            natural = self._distribution.natural(self._theta, values)

            def direction(part: slice) -> Tensor:
                return natural[..., part]

        self.diverged.logical_or_(~alive)
        lr = self._learning_rate(direction, alive)
        eps, pull = self._cost_step(direction, lr)
        for part in self._parts:  # Eq. (7): theta += lr (mean_i u_i (M_i - theta) - eps natural gradient of the cost)
            theta = self._theta[..., part]
            step = direction(part)
            if pull is not None:
                step = step - eps.unsqueeze(-1) * self._distribution.natural(theta, pull[..., part])
            moved = self._distribution.bound(theta + lr.unsqueeze(-1) * step)
            if not self.space.is_bits:  # holding a choice at its sum of 1 may move a last digit: not without a step
                moved = torch.where((lr > 0).unsqueeze(-1), moved, theta)
            theta.copy_(moved)
        self.updates.add_(alive)
        return alive

    def _learning_rate(self, direction: Callable[[slice], Tensor], alive: Tensor) -> Tensor:
        """The learning rate ``(*batch)``, 0 for a run that is not to move."""
        lr = self.learning_rate
        if self._adaptation is not None:
            white = self._distribution.whitened(self._theta, direction(slice(0, self.space.d)))
            norm = white.square().sum(-1).sqrt()
            norm = torch.where(norm > 1e-9, norm, 0.0)  # all losses, or all masks, the same: nothing to learn from
            length = self._adaptation.length(lr)
            lr = torch.where(norm > 0, length / torch.where(norm > 0, norm, 1.0), 0.0)
            self._adaptation.learn(white, norm, length, self.space.freedom)
        return torch.where(alive, lr, 0.0)

    def _cost_step(self, direction: Callable[[slice], Tensor], lr: Tensor) -> tuple[Tensor, Tensor | None]:
        """The eps ``(*batch)`` of this update, and the slopes ``(*batch, d)`` it goes down; None where cost counts
        for nothing."""
        penalty = self._penalty
        if penalty is None or not penalty.counts:
            return torch.zeros_like(lr), None
        slopes = penalty.cost.gradient(self._theta)
        if penalty.target is None:
            return penalty.value / penalty.scale, slopes
        mean = penalty.mean_slopes(self._theta, slopes)
        pull = penalty.pull(mean)
        drift = grip = flattest = torch.zeros_like(lr)
        for part in self._parts:
            natural = self._distribution.natural(self._theta[..., part], pull[..., part])
            drift = drift + (slopes[..., part] * direction(part)).sum(-1)
            grip = grip + (slopes[..., part] * natural).sum(-1)
            if mean is not slopes:
                flattest = flattest + FLATTEST * (mean[..., part] * natural).sum(-1)
        if mean is not slopes:
            grip = torch.maximum(grip, flattest)
        eps = penalty.solve(self._theta, self.updates, lr, drift, grip)
        return (eps, pull) if not self._limits else self._limited_step(direction, lr, eps, (slopes, pull, grip))

    def _limited_step(
        self, direction: Callable[[slice], Tensor], lr: Tensor, eps: Tensor, main: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """The step towards the target, and what keeps every limit on its own way. main: of the target, its slopes, what
        it goes down, and the grip of that.

        Where a limit would be passed, target and limits share the way: each is pulled at as far as the others leave
        something to do, and not at all where they do it alone. The target then holds nothing up.
        """
        moved = direction(slice(0, self.space.d))
        bounds, over = [main], [eps * main[2]]
        for limit in self._limits.values():
            slopes = limit.cost.gradient(self._theta)
            mean = limit.mean_slopes(self._theta, slopes)
            own = limit.pull(mean)
            natural = self._distribution.natural(self._theta, own)
            grip = torch.maximum((slopes * natural).sum(-1), FLATTEST * (mean * natural).sum(-1))
            room = limit.wanted(self.updates + 1) - limit.cost(self._theta)
            bounds.append((slopes, own, torch.where(grip > 0, grip, 1.0)))
            over.append((slopes * moved).sum(-1) - room / torch.where(lr > 0, lr, 1.0))
        all_slopes, pulls, own_grips = (torch.stack(parts, -1) for parts in zip(*bounds))  # (*batch, d, n), (*batch, n)
        naturals = torch.stack([self._distribution.natural(self._theta, own) for own in pulls.unbind(-1)], -1)
        grips = (all_slopes.mT @ naturals).diagonal_scatter(own_grips, dim1=-2, dim2=-1)
        left = torch.stack(over, -1)
        passed = (left[..., 1:] > eps.unsqueeze(-1) * grips[..., 1:, 0]).any(-1, keepdim=True)
        alone = torch.cat([eps.unsqueeze(-1), torch.zeros_like(left[..., 1:])], -1)
        shares = torch.where(passed, shared(grips, left, self._sets), alone)
        return torch.ones_like(eps), (pulls * shares.unsqueeze(-2)).sum(-1)

    def settle(self) -> None:
        """Fix the structure: from now on ``ask`` repeats ``select()`` and ``tell`` changes nothing."""
        self._settled = self.select()

    def _changing(self) -> dict[str, Tensor]:
        """The live tensors that an update changes, by their names in a state."""
        tensors = {"theta": self._theta, "updates": self.updates, "diverged": self.diverged}
        if self.target is not None:  # a fixed penalty is a setting, a solved one is part of the state
            tensors["penalty"] = self.penalty
        if self._signal is not None:
            tensors[f"signal.{self.signal}"] = self._signal.size
        if self._adaptation is not None:
            tensors |= {f"adaptation.{name}": value for name, value in vars(self._adaptation).items()}
        return tensors

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as tensors, with the space's layout as JSON text."""
        state: dict[str, Any] = {name: tensor.clone() for name, tensor in self._changing().items()}
        state |= {"space": self.space.to_json(), "generator": self.generator.get_state()}
        if self.target is not None:
            state["tightened"] = torch.tensor([one.tightened for one in self._bounds.values()], dtype=torch.float64)
        if self._settled is not None:
            state["settled"] = self._settled.clone()
        return state

    def __getstate__(self) -> dict[str, Any]:
        """Without the memory of what was asked last and what was recorded or compiled, which cannot be copied, and
        without what holds the tensors of this search."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("_draw", "_learn")}
        recorded = None if self._recorded is None else Recorded()
        return state | {"_asked": None, "_recorded": recorded, "_one_run": self._one_run is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._draw, self._learn = self._distribution.draw, self._update
        self._one_run = OneRun.of(self) if state["_one_run"] else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of a search of the same space, batch and kind; refused whole if it is of another."""
        if not isinstance(state, Mapping):
            raise BadType(f"a state is what state_dict() returned, not {type(state).__name__}")
        if state.get("space") != self.space.to_json():
            raise BadInput(f"this state is of another space: {state.get('space')}, not {self.space.to_json()}")
        mine = self.state_dict()
        missing = (mine.keys() ^ state.keys()) - {"settled"}
        if "tightened" in mine:  # states of version 0.2 have none
            missing -= {"tightened"}
        if missing:
            raise BadInput(
                f"this state is of another kind of search: they differ in {sorted(missing)} "
                "(see `adaptive`, `target`, `signal`)"
            )
        mine.setdefault("settled", torch.empty((*self.batch, self.space.d), dtype=torch.float32))
        for name, value in state.items():
            if name == "space":
                continue
            if not isinstance(value, Tensor) or value.dtype != mine[name].dtype:
                raise Corrupt(f"{name!r} in this state is not a tensor of {mine[name].dtype}")
            if value.shape != mine[name].shape:
                raise BadInput(
                    f"{name!r} in this state has shape {tuple(value.shape)}, here {tuple(mine[name].shape)}; "
                    "it was saved with another batch or on another kind of device"
                )
        theta = state["theta"]
        if not bool(((theta >= 0) & (theta <= 1)).all()):
            raise Corrupt("theta in this state is not a tensor of probabilities; the file was altered")
        if bool((state["updates"] < 0).any()):
            raise Corrupt("updates in this state is a negative number; the file was altered")
        factors = state["tightened"].tolist() if "tightened" in state else [1.0] * len(self._bounds)
        if not all(0 < factor <= 1 for factor in factors):
            raise Corrupt("tightened in this state is not a share of each budget; the file was altered")
        try:
            self.generator.set_state(state["generator"].cpu())
        except RuntimeError as error:
            raise Corrupt(f"the random generator in this state cannot be restored: {error}") from None
        for name, tensor in self._changing().items():
            tensor.copy_(state[name])
        for one, factor in zip(self._bounds.values(), factors):
            one.tightened = factor
        self._settled = state["settled"].to(self.device).clone() if "settled" in state else None

    # Reading what is given

    def _numbers(self, value: object, name: str) -> Tensor:
        return arguments.per_run(value, name, self.batch, self.device)

    @property
    def _controlled(self) -> Penalty:
        if self._penalty is None:
            raise BadInput("this search has no cost: its space holds no bits to count; give `cost`")
        return self._penalty

    @property
    def _bounds(self) -> dict[str, Penalty]:
        """By name what has a target: it, and the limits."""
        return {} if self.target is None else {"target": self._controlled, **self._limits}

    def _read_penalty(
        self, cost: object, penalty: object, target: object, horizon: object, even: float
    ) -> Penalty | None:
        if penalty is not None and target is not None:
            raise BadInput(f"penalty={penalty!r} and target={target!r} exclude each other; give one of them")
        if target is not None and horizon is None:
            raise BadInput(f"target={target!r} needs horizon, the number of updates of the run")
        if horizon is not None:
            whole_number(horizon, "horizon", 1)
        read = arguments.read_cost(cost, self.space)
        if read is None:
            if penalty is not None or target is not None:
                raise BadInput("a penalty or target on a space without bits needs `cost`")
            return None
        shares = None if target is None else arguments.share(self._numbers(target, "target"), "target")
        eps = self._numbers(0.0 if penalty is None else penalty, "penalty")
        return Penalty(self.space, read, eps, shares, even)

    def _read_limits(self, limits: Mapping[str, tuple[Cost, object]], even: float) -> dict[str, Penalty]:
        """The limits beside the target; what cannot be met together is refused."""
        if not limits:
            return {}
        main = self._penalty
        if main is None or main.target is None:
            raise BadInput(f"limits on {', '.join(limits)} stand beside a target; give one")
        read: dict[str, Penalty] = {}
        for name, (cost, share) in limits.items():
            shares = arguments.share(self._numbers(share, f"the limit on {name}"), f"the limit on {name}")
            own = arguments.read_cost(cost, self.space)
            assert own is not None
            read[name] = one = Penalty(self.space, own, torch.zeros_like(shares), None, even)
            one.target = shares
        bounds = {"the target": main, **read}
        smallest = self._smallest_together(list(bounds.values()))
        if smallest is None:
            listed = "; ".join(
                f"{name} {float(one.budget.min() / one.full_cost):.6g}, "
                f"smallest {float(one.smallest_cost / one.full_cost):.6g}"
                for name, one in bounds.items()
            )
            raise Unreachable(f"these cannot be met together, as shares of each cost: {listed} (what no gate cuts)")
        self._smallest = smallest
        return read

    def _smallest_together(self, costs: Sequence[Penalty]) -> Tensor | None:
        """For each run a structure within all of its budgets ``(*batch, d)``: the smallest of one cost, or else what
        is found between them. None where a run has none."""

        def fits(mask: Tensor, budgets: Sequence[float]) -> bool:
            return all(float(one.cost(mask)) <= most for one, most in zip(costs, budgets))

        rows, found = torch.stack([one.budget.reshape(-1) for one in costs], -1), dict[tuple[float, ...], Tensor]()
        for budgets in {tuple(row) for row in rows.tolist()}:
            mask = next((one.smallest for one in costs if fits(one.smallest, budgets)), None)
            if mask is None:
                mask = selection.fitting(self.space, [(one.cost, rows.new_tensor(b)) for one, b in zip(costs, budgets)])
            if not fits(mask, budgets):
                return None
            found[budgets] = mask
        return torch.stack([found[tuple(row)] for row in rows.tolist()]).reshape(*self.batch, self.space.d)

    def _check_given(self, given: Tensor, name: str, shape: tuple[int, ...], each: str) -> None:
        """Refuse what is not a floating-point tensor of this shape. each: what it holds one number for."""
        if not isinstance(given, Tensor) or not given.is_floating_point():
            kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise BadType(f"{name} are a floating-point tensor, not {kind}")
        if given.shape != shape:
            raise BadInput(f"{name} have shape {tuple(given.shape)}, not {tuple(shape)}: one for each {each}")

    def _check_told(self, masks: Tensor, losses: Tensor, slopes: Tensor | None, spreads: Tensor | None) -> None:
        self.space.check_mask_form(masks)
        if masks.dtype != torch.float32:
            raise BadMaskType(f"masks are float32 as ask() gives them, not {masks.dtype}; use masks.float()")
        if masks.shape != (*self.batch, self.samples, self.space.d):
            wanted = (*self.batch, self.samples, self.space.d)
            raise BadMask(f"masks have shape {tuple(masks.shape)}, not {wanted} as ask() gives them")
        self._check_given(losses, "losses", masks.shape[:-1], "mask")
        if masks.device != self.device:
            raise BadMask(f"masks are on {masks.device}, the search is on {self.device}; use masks.to(...)")
        asked = self._asked is not None and self._asked() is masks and masks._version == self._asked_version
        if self.device.type == "cpu" and not asked:  # looking at values on a GPU would wait for it
            self.space.check_mask(masks)
        for name, given in (("slopes", slopes), ("spreads", spreads)):
            if given is not None:
                self._check_given(given, name, masks.shape, "entry")
                if given.device != self.device:
                    raise BadInput(f"{name} are on {given.device}, the search is on {self.device}; use {name}.to(...)")
        if self.reads_slopes and spreads is not None and self.device.type == "cpu":
            below = spreads < 0
            if bool(below.any()) and bool((below := below & spreads.isfinite()).any()):
                raise BadInput(f"spreads are sizes of slopes and not negative, unlike {spreads[below][0].item():.6g}")


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function compiled for fixed shapes; as it is where torch says, in its first call, that it cannot."""
    form = torch.compile(function, fullgraph=True, dynamic=False)

    def call(*given: Any) -> Tensor:
        nonlocal form
        try:
            return form(*given)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = first_line(getattr(error, "inner_exception", error))
            warnings.warn(f"theta is updated uncompiled: torch.compile says {reason}", stacklevel=2)
            form = function
            return form(*given)

    return call
