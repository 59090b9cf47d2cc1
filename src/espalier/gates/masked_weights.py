"""Masks on weights that no hook on an input reaches: put in the parameters' places while a module that reads them runs.

That is the innermost one, since code may call parts of a model by themselves, and a checkpoint runs them again in the
backward pass. Torch's encoder layers run as one kernel while nothing in them has hooks: these have theirs only under a
mask. Compiled code does not look at hooks again, so that the module around such a layer masks its weights, too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from espalier.gates.one_pass import exchange, put_back, state_of
from espalier.gates.structure import Axis, Structure, is_inside

Held = tuple[tuple[str, str], ...]  # the places of a parameter: the path of a module, and its name there
Places = list[tuple[str, str, Held]]  # seen from a host: the module with the mask, its buffer, and the weight's places


def host_of(structure: Structure, reader: Axis) -> str:
    """The innermost module that runs wherever this parameter is read, and holds it; one that others hold, too, may be
    looked up there without a mask. The model if no reading is known; of a fused layer the whole layer."""
    trace, info = structure.trace, reader.info
    paths = [event.module for event in trace.events if event.weight == info.number]
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*(path.split(".") for path in paths)))
    host = ".".join(level[0] for level in shared)
    while host and not any(is_inside(owner, host) for owner, _ in info.places):
        host = host.rpartition(".")[0]
    host = _called(structure, host)
    return next((layer for layer in trace.p.fused if is_inside(host, layer)), host)


def _called(structure: Structure, path: str, fused: Collection[str] = ()) -> str:
    """The innermost module, this or around it, that the model calls, and that is in none of these fused layers."""
    while path and (path not in structure.trace.calls or any(is_inside(path, layer) for layer in fused)):
        path = path.rpartition(".")[0]
    return path


def mask_weights(
    model: nn.Module, structure: Structure, spots: Iterable[tuple[str, str, Held]]
) -> tuple[dict[nn.Module, Places], dict[nn.Module, Places]]:
    """Hooks for masks ``(host, buffer, the weight's places)``. Returns who has them, and what is for fused layers."""

    def below(host: str, path: str) -> str:
        return path[len(host) :].removeprefix(".")

    hosts, fused = dict[nn.Module, Places](), dict[nn.Module, Places]()
    for own, buffer, held in spots:
        around = _called(structure, own, structure.trace.p.fused)
        for host in {own, around}:
            reached = tuple((below(host, owner), name) for owner, name in held if not host or is_inside(owner, host))
            place = (below(host, own), buffer, reached)
            (hosts if host == around else fused).setdefault(model.get_submodule(host), []).append(place)
    for module, places in hosts.items():
        put_hooks(module, places)
    return hosts, fused


def put_hooks(host: nn.Module, places: Places | None) -> None:
    """In the place of those that it has; None: none."""
    unhook(host, (__name__,))
    if places is not None:
        host.register_forward_pre_hook(functools.partial(_mask, places), with_kwargs=True)
        host.register_forward_hook(_restore, always_call=True)


def unhook(module: nn.Module, files: Collection[str]) -> None:
    """Take the hooks off that are functions of these files."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            function = hook.func if isinstance(hook, functools.partial) else hook
            if getattr(function, "__module__", None) in files:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def _mask(places: Places, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    exchange(host, _masked(places, host) if state_of(host).together.masked else ())


def _masked(places: Places, host: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The masked weights, and where to put them. Where a host around has done so they are masked again, of the weights
    themselves: a checkpoint has to find the same operations inside and outside of that host."""
    states = {path: state_of(host.get_submodule(path)) for path, *_ in places}
    inside: dict[str, dict[str, Tensor]] = {path: {} for path in states}
    own: dict[Held, Tensor] = {}
    masked: dict[Held, Tensor] = {}
    for path, buffer, held in places:
        mask = host.get_submodule(path)._buffers[buffer]
        assert mask is not None
        if held not in own:
            weight = states[path].inside.get(buffer, host.get_submodule(held[0][0])._parameters[held[0][1]])
            assert weight is not None
            own[held] = masked[held] = weight
        inside[path][buffer] = own[held]
        masked[held] = masked[held] * mask.to(own[held].dtype)
    owners = {path: host.get_submodule(path) for *_, held in places for path, _ in held}
    yield from ((owners[path]._parameters, name, w) for held, w in masked.items() for path, name in held)
    for owner in owners.values():
        if isinstance(owner, nn.RNNBase):  # these keep a second list of their weights, which functional_call forgets
            yield owner.__dict__, "_flat_weights", [owner._parameters[name] for name in owner._flat_weights_names]
    yield from ((vars(states[path]), "inside", weights) for path, weights in inside.items())


def _restore(host: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    put_back(host)
