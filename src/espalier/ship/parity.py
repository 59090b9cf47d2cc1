"""Whether two networks give the same: their outputs side by side, and inputs of any batch size to try them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from espalier.gates.verify import distance
from espalier.space import EspalierError, first_line
from espalier.train import pytree
from espalier.train.scoring import answers

BATCHES = (1, 2, 7, 33)


class NotExported(EspalierError, RuntimeError):
    """The network could not be written, or the file does not compute what the network does."""


@dataclass(frozen=True)
class Checked:
    """What was compared with torch: batches of these sizes, each of real and of random inputs. difference: the largest,
    relative to the largest output. inputs: name, type and shape of what the file takes, 0 for a batch of any size.
    outputs: the names of what it gives, where it has names for them."""

    batches: tuple[int, ...]
    difference: float
    inputs: tuple[tuple[str, str, tuple[str | int, ...]], ...]
    outputs: tuple[str, ...] = ()


def compare(
    run: Callable[[Any], list[Tensor]],
    model: nn.Module,
    inputs: Any,
    name: str,
    tolerance: float,
    batches: Sequence[int] = BATCHES,
) -> Checked:
    """run: what was written, from inputs to outputs. name: of it, for messages. Raises where it does not compute what
    the model does, on real and on random inputs at several batch sizes."""
    inputs = pytree.each(lambda t: t.detach().cpu(), inputs)
    worst = 0.0
    for batch in batches:
        for what, given in (("real", repeated(inputs, batch)), ("random", random_like(inputs, batch))):
            try:
                with torch.no_grad():
                    outputs = run(given)
            except Exception as error:
                raise NotExported(f"{name} fails at {batch} examples: {reason(error)}") from error
            expected = answers(model, given)
            difference = distance(expected, outputs)
            steps = [torch.finfo(t.dtype).eps for t in (*model.parameters(), *expected) if t.is_floating_point()]
            allowed = max(tolerance, 4 * max(steps, default=0.0))  # half precision rounds more coarsely
            if not difference <= allowed:
                raise NotExported(
                    f"{name}: at {batch} {what} examples it differs from torch by {difference:.2g} of the largest "
                    f"output; {allowed:.2g} is allowed"
                )
            worst = max(worst, difference)
    names = pytree.named(inputs) or [f"input {i}" for i, _ in enumerate(pytree.tensors(inputs))]
    listed = zip(names, pytree.tensors(inputs))
    described = tuple((one, str(t.dtype).removeprefix("torch."), (0, *t.shape[1:])) for one, t in listed)
    return Checked(tuple(batches), worst, described)


def examples(inputs: Any) -> int:
    """How many; one where its tensors do not share a number of them, as nodes and edges of a graph."""
    sizes = pytree.sizes(inputs)
    return sizes.pop() or 1 if len(sizes) == 1 else 1


def repeated(inputs: Any, batch: int) -> Any:
    """So many real examples: those given, from the first again where they do not suffice."""
    n = examples(inputs)
    if n == batch:
        return inputs
    if len(pytree.sizes(inputs)) != 1:
        raise NotExported("this file is for a batch of any size, and these inputs are one example: ship as torch alone")
    return pytree.each(lambda t: t[torch.arange(batch, device=t.device) % n], inputs)


def random_like(inputs: Any, batch: int, seed: int = 0) -> Any:
    """So many random examples: normal with the mean and deviation of those given; integers within their range."""
    generator = torch.Generator().manual_seed(seed)

    def draw(tensor: Tensor) -> Tensor:
        shape = (batch, *tensor.shape[1:])
        if tensor.dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if tensor.is_floating_point():
            noise = torch.randn(shape, generator=generator, dtype=torch.float64)
            values = tensor.detach().cpu().double()
            return (noise * values.std(correction=0) + values.mean()).to(tensor.dtype)
        low, high = int(tensor.min()), int(tensor.max())
        return torch.randint(low, high + 1, shape, generator=generator).to(tensor.dtype)

    return pytree.each(draw, inputs)


def reason(error: BaseException) -> str:
    """The deepest one, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}" if str(error).strip() else type(error).__name__
