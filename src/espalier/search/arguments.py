"""Reading the arguments of a search: each error names the value and the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.cost import Cost
from espalier.space import BadInput, BadType, Space, first_line, whole_number


def per_run(value: object, name: str, batch: tuple[int, ...], device: torch.device) -> Tensor:
    """One number for all runs or one for each: ``(*batch)`` float64."""
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64, device=device).detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise BadType(f"{name} is a number, or one for each run, not {value!r}") from None
    if isinstance(value, bool):
        raise BadType(f"{name} is a number, not {value!r}")
    if numbers.shape not in ((), batch):
        raise BadInput(f"{name} is one number or has the shape of the batch {batch}, not {tuple(numbers.shape)}")
    wrong = numbers[~numbers.isfinite()]
    if wrong.numel():
        raise BadInput(f"{name} is finite, not {wrong.flatten()[0].item()!r}")
    return numbers.expand(batch).clone()


def positive(numbers: Tensor, name: str) -> Tensor:
    if bool((numbers <= 0).any()):
        raise BadInput(f"{name} is positive, not {numbers[numbers <= 0].flatten()[0].item()!r}")
    return numbers


def share(numbers: Tensor, name: str) -> Tensor:
    wrong = numbers[(numbers <= 0) | (numbers > 1)]
    if wrong.numel():
        value = wrong.flatten()[0].item()
        hint = f"; {value:g}% is {value / 100:g}" if 1 < value <= 100 else ""
        raise BadInput(f"{name} is a share of the full cost in (0, 1], not {value!r}{hint}")
    return numbers


def batch_shape(batch: object) -> tuple[int, ...]:
    if isinstance(batch, int) and not isinstance(batch, bool):
        batch = (batch,)
    if not isinstance(batch, Sequence) or isinstance(batch, str):
        raise BadType(f"batch is the shape of the runs, such as (8,), not {batch!r}")
    return tuple(whole_number(size, "a size in batch", 1) for size in batch)


def read_cost(cost: object, space: Space) -> Cost | None:
    """A cost over the space; None where there is none to read and no bit to count."""
    if cost is None:
        if not space.bits:
            return None
        counts = torch.zeros(space.d, dtype=torch.float64)
        for _, where in space.bits:
            counts[where] = 1.0
        cost = counts
    if not isinstance(cost, Cost):
        cost = Cost.linear(cost)
    return cost.over(space)


def real(value: object, name: str, what: str = "a number") -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadType(f"{name} is {what}, not {value!r}")
    return float(value)


def read_margin(margin: float | None) -> float | None:
    if margin is not None and not 0 <= real(margin, "margin") < 0.5:
        raise BadInput(f"margin is in [0, 0.5), not {margin!r}: theta of a bit stays in [margin, 1 - margin]")
    return margin if margin is None else float(margin)


def read_device(device: str | torch.device | None) -> torch.device:
    try:
        return torch.empty(0, device=device or "cpu").device  # "cuda" gets its index
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"device {device!r} cannot be used: {first_line(error)}") from None


def read_initial(initial: object, space: Space, batch: tuple[int, ...], device: torch.device) -> Tensor:
    """Theta ``(d)`` or ``(*batch, d)``, of itself or of a probability for every bit; options are then alike."""
    if not isinstance(initial, Tensor):
        bit = real(initial, "initial", "a probability or a tensor of them")
        if not 0 <= bit <= 1:
            raise BadInput(f"initial is a probability in [0, 1], not {initial!r}")
        theta = torch.full((space.d,), bit, dtype=torch.float64, device=device)
        for choice, where in space.choices:
            theta[where] = 1 / choice.size
        return theta
    theta = initial.detach().to(device=device, dtype=torch.float64)
    if theta.shape not in ((space.d,), (*batch, space.d)):
        allowed = " or ".join(dict.fromkeys(str(shape) for shape in ((space.d,), (*batch, space.d))))
        raise BadInput(f"initial has shape {allowed}, not {tuple(theta.shape)}")
    wrong = theta[~((theta >= 0) & (theta <= 1))]
    if wrong.numel():
        raise BadInput(f"initial holds probabilities in [0, 1], not {wrong[0].item()!r}")
    for group, where in space.choices:
        total = theta[..., where].sum(-1)
        if bool(((total - 1).abs() > 1e-6).any()):
            raise BadInput(f"initial of choice {group.name!r} adds up to 1, not to {total.flatten()[0].item()!r}")
    return theta


def read_even(even: object) -> float:
    if not 0 <= real(even, "even") <= 1:
        raise BadInput(f"even is in [0, 1], not {even!r}: 0 takes from gates by their cost, 1 from all alike")
    return real(even, "even")


Ramp = float | Callable[[float], float | Sequence[float] | Tensor]


def read_part(ramp: object) -> float:
    part = real(ramp, "ramp", "a share of the horizon or a function of progress")
    if not 0 < part <= 1:
        after = "the target is reached inside the run"
        raise BadInput(f"ramp is a share of the horizon in (0, 1], not {ramp!r}: {after}")
    return part


def read_ramp(horizon: object, ramp: object, batch: tuple[int, ...], device: torch.device) -> int | Tensor:
    """The number of updates of a straight way to the target, or of a function of progress a table of how much of the
    way is gone after 0, 1, .. updates, ``(horizon + 1, *batch)``: looked up where the search is, without a wait."""
    updates = whole_number(horizon, "horizon", 1)
    if not callable(ramp):
        return max(round(read_part(ramp) * updates), 1)
    rows = [ramp(update / updates) for update in range(updates + 1)]
    if all(isinstance(row, (int, float)) for row in rows):
        table = torch.tensor(rows, dtype=torch.float64, device=device).reshape(-1, *(1 for _ in batch))
    else:
        table = torch.stack([per_run(row, "ramp", batch, device) for row in rows])
    if not bool(table.isfinite().all()):
        raise BadInput("ramp, a function of progress, gives a value that is not finite")
    if bool(((table[0].abs() > 1e-9) | ((table[-1] - 1).abs() > 1e-9)).any()):
        ends = f"{table[0].flatten()[0].item():g} to {table[-1].flatten()[0].item():g}"
        raise BadInput(f"ramp, a function of progress, goes from 0 at 0 to 1 at 1, not from {ends}")
    falls = (table.diff(dim=0) < 0).reshape(updates, -1).any(1).nonzero()
    if len(falls):
        raise BadInput(f"ramp, a function of progress, never falls, but it does after {falls[0].item() / updates:g}")
    return table.expand(-1, *batch)
