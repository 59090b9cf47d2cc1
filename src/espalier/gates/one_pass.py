"""Several masks in one pass: each example of a batch under a mask of its own.

Layout: with S masks example n of the batch runs under mask ``n % S``. The batch is then a view ``(B, S, ..)`` whatever
its strides, the product with masks ``(S, ..)`` needs no index, and in NCHW order ``(B * S, C, H, W)`` is a view
``(B, S * C, H, W)``, in which BatchNorm takes the statistics of each mask's examples alone.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from espalier.space import BadInput

STATE = "_espalier_state"  # on the root and on every module with a mask buffer or with statistics of the batch
HELD = "_espalier_held"  # on a module, while it runs with other tensors than its own
GROUPED = ("cpu",)  # where a grouped convolution is as fast as a plain one; on a GPU this was not measured
Shape = tuple[int, ...]


class Unfit(BadInput):
    """Several masks cannot run in one pass here; one at a time can."""


class Together:
    """What the modules of one gated model know of its masks and of the pass under way; a copy of the model has its own.

    ran: the whole model with its hooks, since this was unset; bare: without a mask. masked: one mask is set. slopes:
    gradients reach it.
    samples: masks in one pass, 0 for one mask at a time.
    open: by id, the buffers of ones where no gate is closed; what they would multiply is left as it is. examples: in
    the pass. dims: by module, which dimension of its input holds the examples; 0 where nothing is said. copies: the
    states of copies made under each mask that is set, which all copies share.
    """

    def __init__(self) -> None:
        self.ran = self.bare = self.masked = self.slopes = False
        self.samples = self.examples = 0
        self.open: dict[int, Tensor] = {}
        self.copies: list[list[Any]] = []
        self.dims: dict[str, int] = {}
        self.check: Callable[[Together, Any, Any], None] | None = None  # raises where a call must not run in one pass
        self.watched: dict[str, list[Shape]] | None = None  # a trial notes here what shapes each module reads
        self.expected: dict[str, list[Shape]] | None = None  # ... and finds here those of one mask at a time

    def __deepcopy__(self, memo: dict[int, Any]) -> Together:
        twin = Together()
        self.ran = self.ran or bool(self.copies)  # a copy made under a mask runs in the model's place
        twin.masked, twin.copies = self.masked, self.copies
        twin.samples, twin.dims, twin.check = self.samples, dict(self.dims), self.check
        memo[id(self)] = twin
        return twin

    @property
    def active(self) -> bool:
        return self.samples > 0 or self.watched is not None

    def begin(self, args: Any, kwargs: Any) -> None:
        """A forward pass of the whole model begins: count its examples."""
        self.examples = examples_of((args, kwargs))
        if self.samples and (not self.examples or self.examples % self.samples):
            raise Unfit(
                f"{self.samples} masks in one pass need a multiple of {self.samples} examples, not {self.examples}"
            )
        if self.samples and self.check is not None and not torch.compiler.is_compiling():
            self.check(self, args, kwargs)


class State:
    """Kept beside a module's mask buffers, and on the root: its path, and what the whole model knows of its masks.

    A copy of the module has a state of its own. ``is_original``: this is none. ``inside``: by mask buffer, the weight
    itself while a masked one is in its place.
    """

    def __init__(self, path: str = "", together: Together | None = None, module: nn.Module | None = None) -> None:
        self.path, self.together, self.is_original = path, together or Together(), module is not None
        self.inside: dict[str, Tensor] = {}
        self.of: Callable[[], nn.Module | None] = (lambda: None) if module is None else weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        module = memo.get(id(self.of()))  # the copy of the module, which is under way
        state = State(self.path, copy.deepcopy(self.together, memo), module)
        state.is_original = False
        if self.together.copies:
            self.together.copies[-1].append(state)
        return state

    def __reduce__(self) -> tuple[Callable[[bool], State], tuple[bool]]:
        return _elsewhere, (self.together.masked,)

    def several(self, x: Tensor) -> bool:
        """Whether the module runs under several masks; a trial notes what it reads."""
        if self.together.watched is not None:
            self.together.watched.setdefault(self.path, []).append(tuple(x.shape))
        return self.together.samples > 0

    def dim(self, x: Tensor) -> int:
        """The dimension of the module's input that holds the examples."""
        together, path = self.together, self.path or "the model"
        if together.expected is None:
            return together.dims.get(self.path, 0)
        left = together.expected.get(self.path)
        dim = examples_dim(left.pop(0), tuple(x.shape), together.samples) if left else None
        if dim is None:
            raise Unfit(f"what {path} reads has no one dimension that grows with the number of examples")
        if together.dims.setdefault(self.path, dim) != dim:
            raise Unfit(f"{path} reads its examples now in one dimension, now in another")
        return dim

    def split(self, size: int) -> tuple[int, ...]:
        """How a dimension of examples is laid out: (B, samples), and what each example holds of it if not one."""
        path, examples, samples = self.path, self.together.examples, self.together.samples
        if not examples:
            raise Unfit(f"{path} runs by itself; under several masks call the whole model, which counts the examples")
        if size % examples:
            raise Unfit(f"{path} reads {size} rows of {examples} examples: whose they are cannot be told")
        rows = (examples // samples, samples)
        return rows if size == examples else (*rows, size // examples)


def _elsewhere(masked: bool) -> State:
    """The state of a module that was sent to another process: there it is of nobody."""
    state = State()
    state.together.masked = masked
    return state


def state_of(module: nn.Module) -> State:
    state: State = module.__dict__[STATE]
    return state


def examples_of(inputs: Any) -> int:
    """The number of examples: the length of the first tensor."""
    leaves = _pytree.tree_leaves(inputs)
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), None)
    if first is None:
        raise Unfit("the model is called without a tensor, so there are no examples to give masks to")
    return len(first)


def examples_dim(one: Shape, all_: Shape, samples: int) -> int | None:
    """The dimension that is ``samples`` times as long in one shape as in the other, where it is the only difference."""
    if len(one) != len(all_):
        return None
    unlike = [dim for dim, (a, b) in enumerate(zip(one, all_)) if a != b]
    return unlike[0] if len(unlike) == 1 and all_[unlike[0]] == samples * one[unlike[0]] else None


def unflatten(x: Tensor, dim: int, rows: tuple[int, ...]) -> Tensor:
    """A view with one dimension as several, whatever the strides."""
    return x.view(*x.shape[:dim], *rows, *x.shape[dim + 1 :])


def product(module: nn.Module, x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """x times the mask; under several ``(samples, ..)`` each example times its own. dim: of the examples, if known."""
    state = state_of(module)
    if not state.several(x):
        return x * mask
    if x.is_nested:
        raise Unfit(f"{state.path} reads a nested tensor")
    dim = state.dim(x) if dim is None else dim
    rows = state.split(x.shape[dim])
    own, behind = mask.shape[1:], x.ndim - 1 - dim
    if len(own) > behind:
        raise Unfit(f"{state.path} reads its gated axis before its examples")
    between = (1,) * (len(rows) - 2 + behind - len(own))
    mask = mask.to(x.dtype).reshape(rows[1], *between, *own)
    each: Tensor = unflatten(x, dim, rows) * mask
    return each.flatten(dim, dim + len(rows) - 1)


def exchange(module: nn.Module, changes: Iterable[tuple[dict[str, Any], str, Any]], note: Any = None) -> None:
    """While a module runs: other values in its places ``(dict, key, value)``, or in those of modules in it. Of one that
    calls itself each call has its own."""
    held: list[tuple[dict[str, Any], str, Any]] = []
    module.__dict__.setdefault(HELD, []).append((held, note))
    for place, name, value in changes:
        held.append((place, name, place[name]))
        place[name] = value


def put_back(module: nn.Module) -> tuple[dict[str, Any], Any] | None:
    """Its own values in their places again. Returns those that were there, and the note; None: it has its own."""
    if HELD not in module.__dict__:
        return None
    held, note = module.__dict__[HELD].pop()
    if not module.__dict__[HELD]:
        del module.__dict__[HELD]
    others = {name: place[name] for place, name, _ in held}
    for place, name, value in held:
        place[name] = value
    return others, note


# ---- convolutions ----------------------------------------------------------------------------------------------------


def can_group(module: nn.Module) -> bool:
    """Whether a layer is a plain convolution, which can run as one of several groups."""
    return type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and bool(module.groups == 1)


def group_masks(module: Any, x: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    """Before a convolution whose weight is smaller than its input: mask the weight once for each mask, and let each
    group of a grouped convolution be one mask. ``(B * S, C, ..)`` is a view ``(B, S * C, ..)``, so nothing is computed
    or kept of the size of the input. Where that is no view, the input is masked.

    mask: ``(S, ..)``. shape: of one mask on the weight. Returns what the convolution reads.
    """
    state = state_of(module)
    samples = state.together.samples
    lies_so = x.ndim == module.weight.ndim and x.stride(0) == x.shape[1] * x.stride(1)
    smaller = samples * module.weight.numel() < x.numel()
    if not lies_so or not smaller or x.device.type not in GROUPED:
        return product(module, x, mask)
    dim = state.dim(x)
    rows = state.split(x.shape[dim])
    if dim or len(rows) > 2:
        return product(module, x, mask, dim)
    weight, bias = module.weight, module.bias
    masked = (weight * mask.reshape(samples, *shape).to(weight.dtype)).flatten(0, 1)
    places = [(module._parameters, "weight", masked), (module.__dict__, "groups", samples)]
    places += [] if bias is None else [(module._parameters, "bias", bias.repeat(samples))]
    exchange(module, places, samples)
    return unflatten(x, 0, rows).flatten(1, 2)


def restore_layer(module: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
    """After a layer with a masked weight: its own again; where groups were masks, the examples as they were."""
    held = None if torch.compiler.is_compiling() else put_back(module)
    samples = 0 if held is None else held[1]
    if not samples or not isinstance(output, Tensor):  # of one mask; or it failed
        return None
    return unflatten(output, 1, (samples, output.shape[1] // samples)).flatten(0, 1)


# ---- BatchNorm -------------------------------------------------------------------------------------------------------


def has_rule(norm: nn.modules.batchnorm._BatchNorm) -> bool:
    """Whether this BatchNorm computes what torch's own does."""
    return type(norm).forward is nn.modules.batchnorm._BatchNorm.forward


def split_batch(module: Any, args: tuple[Any, ...]) -> Any:
    """Before a BatchNorm in train mode: a channel for each mask, ``(B * S, C, ..)`` as ``(B, S * C, ..)``.

    Its parameters are repeated for the length of the call, and its running statistics are set aside.
    """
    state = state_of(module)
    if torch.compiler.is_compiling() or not state.together.active:
        return None
    if not args:
        raise Unfit(f"{state.path} is given its input by name")
    x = args[0]
    if not state.several(x):
        return None
    if state.dim(x) or x.ndim < 2:
        raise Unfit(f"{state.path} does not read its examples first")
    if not (module.training or module.running_mean is None):
        return None
    rows = state.split(x.shape[0])
    samples = rows[1]
    affine = {name: module._parameters[name] for name in ("weight", "bias")}
    running = {name: module._buffers[name] for name in ("running_mean", "running_var")}
    places = [(module._parameters, name, t.repeat(samples)) for name, t in affine.items() if t is not None]
    places += [(module._buffers, name, t.new_zeros(samples * len(t))) for name, t in running.items() if t is not None]
    places.append((module.__dict__, "momentum", 1.0))  # the statistics of this batch, and nothing of those before
    exchange(module, places, (x, rows))
    x = unflatten(x, 0, rows)
    if len(rows) == 3:  # what an example holds of the rows goes beside the first dimension behind the channels
        x = x.movedim(2, 3)
        x = x.flatten(3, 4) if x.ndim > 4 else x
    return (x.flatten(1, 2), *args[1:])


def join_batch(module: Any, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
    """After it: the examples as they were; running statistics as if the masks had run one after another."""
    held = None if torch.compiler.is_compiling() else put_back(module)
    if held is None or not isinstance(output, Tensor):  # nothing was split; or it failed
        return None
    fresh, (x, rows) = held
    if module.training and module.running_mean is not None:
        _keep(module, fresh, rows[1])
    channels = x.shape[1]
    output = unflatten(output, 1, (rows[1], channels))
    if len(rows) == 3:
        output = unflatten(output, 3, (rows[2], x.shape[2])) if x.ndim > 2 else output
        output = output.movedim(3, 2)
    output = output.flatten(0, len(rows) - 1)
    for layout in (torch.channels_last, torch.channels_last_3d):
        fits = x.ndim == (4 if layout is torch.channels_last else 5) and not x.is_contiguous()
        if fits and x.is_contiguous(memory_format=layout):
            output = output.contiguous(memory_format=layout)
    return output


@torch.no_grad()
def _keep(module: Any, fresh: dict[str, Tensor], samples: int) -> None:
    """Move the running statistics by those of each mask, in their order. The call itself has counted one batch."""
    count = module.num_batches_tracked
    for mask in range(samples):
        if count is not None and mask:
            count.add_(1)
        factor = 1.0 / float(count) if module.momentum is None else module.momentum
        for name in ("running_mean", "running_var"):
            statistics = module._buffers[name]
            statistics.lerp_(fresh[name][mask * len(statistics) : (mask + 1) * len(statistics)], factor)


# ---- each mask's own outputs -----------------------------------------------------------------------------------------


def apart(outputs: Any, dims: Sequence[int], examples: int, samples: int) -> list[Any]:
    """The outputs of one pass as those of each mask. dims: of each tensor in them, the dimension of the examples."""
    leaves, form = _pytree.tree_flatten(outputs)
    each: list[list[Any]] = [[] for _ in range(samples)]
    left = list(dims)
    for leaf in leaves:
        parts = [leaf] * samples
        if isinstance(leaf, Tensor):
            dim = left.pop(0)
            inner = leaf.shape[dim] // examples
            rows = (examples // samples, samples, inner)
            # unbind, not slices: its backward pass writes one gradient, not one for each mask
            parts = [part.flatten(dim, dim + 1) for part in unflatten(leaf, dim, rows).unbind(dim + 1)]
        for mine, part in zip(each, parts):
            mine.append(part)
    return [_pytree.tree_unflatten(mine, form) for mine in each]


def interleaved(parts: Sequence[Tensor]) -> Tensor:
    """Examples ``(B, ..)`` for each mask as one batch: example b of mask s at ``b * S + s``; images lie as they did."""
    first = parts[0]
    images = first.ndim == 4 and not first.is_contiguous() and first.is_contiguous(memory_format=torch.channels_last)
    joined = torch.stack(list(parts), 1).flatten(0, 1)
    return joined.contiguous(memory_format=torch.channels_last) if images else joined
