"""The trace: one forward pass of the example, watched operation by operation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from espalier.gates.gate import Gate
from espalier.gates.layout import Block, Layout, Propagation
from espalier.gates.record import Copy, GateUse, Trace, collect, tensors_in
from espalier.gates.watch import Leaks, Watcher
from espalier.space import BadInput, EspalierError


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    inputs: bool,
    hand: bool,
    even: Collection[str] = (),
) -> Trace:
    """Run the model once on the example, in eval mode and without gradients, and see what it does.

    ``inputs``: give the features of floating-point inputs atoms, so that they can be gated. ``hand``: hand-placed
    gates are there; then a slice may also be left out where a module reads it (see ``Copy``). ``even``: grouped
    convolutions to cut evenly inside their groups instead of by whole groups.
    """
    p = Propagation()
    p.even = set(even)
    found = Trace(p, collect(model, p))
    watcher = Watcher(found, hand)
    if inputs:
        for tensor in (*tensors_in(args), *tensors_in(kwargs)):
            if tensor.is_floating_point() and tensor.ndim > 1:
                shape = tuple(tensor.shape)
                atoms = p.atoms.new(int(np.prod(shape[1:])))
                found.inputs.append(atoms)
                watcher.set(tensor, p.clean(shape, [Block(tuple(range(1, len(shape))), atoms.reshape(shape[1:]))]))
    try:
        with _hooked(model, watcher), quiet_kernels(), torch.no_grad(), Leaks(watcher), watcher:
            output = model(*args, **kwargs)
    except EspalierError:
        raise
    except Exception:
        _refuse_unless_it_runs(model, args, kwargs)
        raise
    p.where = "the model"
    for tensor in tensors_in(output):
        p.freeze(watcher.of(tensor), "reaches the model's output")
    p.settle_splits()
    return found


def _refuse_unless_it_runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """After a failure: whether it is the model's own, on these inputs, or came of being watched."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        said = " ".join(str(error).split())
        said = said if len(said) <= 300 else said[:300] + " .."
        raise BadInput(f"the model does not run on example_inputs: {type(error).__name__}: {said}") from error
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def quiet_kernels() -> Iterator[None]:
    """Fused kernels off, so that operations arrive one by one; the user's settings come back."""
    fast = torch.backends.mha.get_fastpath_enabled()
    mkldnn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(mkldnn)
        torch._C._set_cudnn_enabled(cudnn)


@contextlib.contextmanager
def _hooked(model: nn.Module, watcher: Watcher) -> Iterator[None]:
    """Hooks that keep the stack of running modules, in eval mode; all is put back afterwards."""
    modes = {module: module.training for module in model.modules()}
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(watcher, path), with_kwargs=True))
        handles.append(module.register_forward_hook(_leave(watcher, path)))
    model.eval()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode


def _enter(watcher: Watcher, path: str) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = watcher.trace
        watcher.stack.append(path)
        watcher.began.append(watcher.time)
        if _is_leaf(module):
            found.order.append((watcher.time, path))
        found.calls[path] = found.calls.get(path, 0) + 1
        if args and isinstance(args[0], Tensor):
            if isinstance(module, Gate):
                watcher.paused = True
                return None
            layout = watcher.of(args[0])
            if _is_leaf(module) and len(args) == 1 and not kwargs:
                made = _boundary(watcher, path, module, layout)
                if made is not None:
                    tensor = args[0].detach().clone()
                    watcher.set(tensor, made)
                    found.entries.setdefault(path, []).append(made)
                    return (tensor,), kwargs
            found.entries.setdefault(path, []).append(layout)
        return None

    return hook


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _boundary(watcher: Watcher, path: str, module: nn.Module, layout: Layout) -> Layout | None:
    """Fresh atoms on the axis a leaf module works along, joined to the old ones by a ``Copy``."""
    found, p = watcher.trace, watcher.trace.p
    if not layout.blocks or layout.weight >= 0:
        return None
    if not watcher.hand:
        mine = np.concatenate(found.inputs) if found.inputs else np.zeros(0, dtype=np.int64)
        if not np.isin(layout.all(), mine).all():
            return None
    if isinstance(module, nn.modules.conv._ConvNd):  # of an input image whole channels can be left out
        layout, _ = p.only(layout, len(layout.shape) - len(module.kernel_size) - 1, "convolved over")
    blocks = []
    for block in layout.blocks:
        if len(block.dims) > 1:
            blocks.append(block)
            continue
        after = p.atoms.new(len(block.atoms))
        found.copies.append(Copy(path, block.dims[0], block.atoms, after))
        blocks.append(Block(block.dims, after))
    return Layout(layout.shape, tuple(blocks))


def _leave(watcher: Watcher, path: str) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        watcher.stack.pop()
        began = watcher.began.pop()
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            watcher.results.setdefault(id(first), []).append((path, began))
        found = watcher.trace
        if isinstance(module, Gate) and isinstance(output, Tensor):
            watcher.paused = False
            layout = watcher.of(args[0])
            layout, atoms = found.p.only(layout, module.dim % len(layout.shape), "gated along one of its axes")
            dim = module.dim % len(layout.shape)
            if atoms is None:
                atoms = found.p.atoms.new(layout.shape[dim])
                found.p.atoms.freeze(atoms, f"a tensor of fixed size (in {path})")
            after = found.p.atoms.new(len(atoms))
            found.gates.append(GateUse(path, atoms, after))
            rest = tuple(b for b in layout.blocks if dim not in b.dims)
            watcher.set(output, found.p.clean(layout.shape, (*rest, Block((dim,), after))))
        elif isinstance(output, Tensor):
            found.exits.setdefault(path, []).append(watcher.of(output))
        return None

    return hook
