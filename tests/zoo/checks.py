"""The laws of gates, measured on one model: every function returns numbers, the tests and the table judge them."""

from __future__ import annotations

import contextlib
import functools
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import espalier

from .catalogue import BY_NAME
from .counter import by_layers, by_operations, layer_weights
from .entry import SMALL_SHARE, Entry, Inputs, call, flat

TOLERANCE = 1e-9  # relative, float64: law 5


@dataclass(frozen=True)
class Subject:
    """An architecture with gates attached, and the inputs it was attached with."""

    entry: Entry
    model: nn.Module
    gated: Any
    inputs: Inputs

    @classmethod
    def of(cls, entry: Entry) -> Subject:
        model, inputs = entry.build(), entry.inputs()
        return cls(entry, model, espalier.attach(model, inputs, kinds=entry.kinds), inputs)

    @classmethod
    def or_refusal(cls, entry: Entry) -> Subject | str:
        """The subject, or what the library said when it found nothing to gate."""
        try:
            return cls.of(entry)
        except espalier.NoGates as refusal:
            return str(refusal)

    @cached_property
    def ones(self) -> Tensor:
        return torch.ones(self.gated.d)


@functools.cache
def subject(name: str) -> Subject:
    """Attached once per process: attaching is the larger part of what a test takes."""
    return Subject.of(BY_NAME[name])


def masks(gated: Any, number: int, seed: int = 0) -> list[Tensor]:
    """`number` random masks ``(d,)`` from dense to nearly empty, then the emptiest one."""
    generator = torch.Generator().manual_seed(seed)
    shares = [0.97 - 0.95 * i / max(1, number - 1) for i in range(number)]
    drawn = [(torch.rand(gated.d, generator=generator) < share).float() for share in shares]
    return [*drawn, torch.zeros(gated.d)]


def relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value expected; infinite when the shapes differ or a value is not finite."""
    if got.shape != expected.shape or not bool(got.isfinite().all()):
        return float("inf")
    if not got.numel():
        return 0.0
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-300))


@contextlib.contextmanager
def mode(model: nn.Module, train: bool) -> Iterator[nn.Module]:
    """Train or eval mode; afterwards the mode and every buffer are as before."""
    before = model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train(train)
    try:
        yield model
    finally:
        model.train(before)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def masked_output(subject: Subject, mask: Tensor, inputs: Inputs, train: bool) -> Tensor:
    with mode(subject.model, train), subject.gated.masked(mask), torch.no_grad():
        return flat(call(subject.model, inputs))


def compact_output(small: nn.Module, inputs: Inputs, train: bool) -> Tensor:
    with mode(small, train), torch.no_grad():
        return flat(call(small, inputs))


def mismatch(subject: Subject, mask: Tensor, *several: Inputs) -> tuple[float, float]:
    """Law 5: how far ``masked(canonical(m))`` and ``compact(m)`` are apart at most, in eval and in train mode.

    ``several``: inputs to compare them on; the example's if there are none.
    """
    canonical, small = subject.gated.canonical(mask), subject.gated.compact(mask)
    worst = [0.0, 0.0]
    for inputs in several or (subject.inputs,):
        for train in (False, True):
            expected = masked_output(subject, canonical, inputs, train)
            worst[train] = max(worst[train], relative(compact_output(small, inputs, train), expected))
    return worst[0], worst[1]


def effect(subject: Subject, mask: Tensor) -> float:
    """How far a mask moves the output: gates that do nothing would pass every comparison."""
    with mode(subject.model, False), torch.no_grad():
        plain = flat(call(subject.model, subject.inputs))
    return relative(masked_output(subject, mask, subject.inputs, False), plain)


def roads(subject: Subject, mask: Tensor) -> dict[str, tuple[float, ...]]:
    """Law 6: each cost by the library, from the compact model's tensors, and from the operations it executes.

    MACs are per example: those of the batch the gates were attached with.
    """
    gated, canonical = subject.gated, subject.gated.canonical(mask)
    small = gated.compact(mask).eval()
    tensors, seen = by_layers(small), by_operations(small, subject.inputs)
    said = {kind: float(gated.cost(kind)(canonical)) for kind in ("weights", "macs", "units", "parameters")}
    return {
        "weights": (said["weights"], float(tensors.weights), float(seen.weights)),
        "macs": (said["macs"], float(seen.macs)),
        "parameters": (said["parameters"], float(tensors.parameters)),
        "units": (said["units"], float(canonical.sum())),
    }


def smallest_share(subject: Subject) -> float:
    """The share of the weights that the emptiest canonical mask keeps."""
    cost = subject.gated.cost("weights")
    return float(cost(subject.gated.canonical(torch.zeros(subject.gated.d))) / cost(subject.ones))


def share_bound(entry: Entry, model: nn.Module) -> float:
    """What `smallest_share` may be at most: 5%, or for a transformer what no gate can cut and 2 points."""
    if entry.family != "transformer":
        return SMALL_SHARE
    sizes = {name: tensor.numel() for name, tensor in layer_weights(model)}
    named = {id(tensor): name for name, tensor in model.named_parameters()}
    names = {name: named[id(tensor)] for name, tensor in layer_weights(model)}  # a tied weight by its first name
    for pattern in entry.fixed:
        assert any(re.search(pattern, name) for name in names.values()), f"{entry.name}: nothing is named {pattern}"
    fixed = sum(size for name, size in sizes.items() if any(re.search(f, names[name]) for f in entry.fixed))
    return fixed / sum(sizes.values()) + 0.02


def kept(subject: Subject, mask: Tensor) -> dict[str, Tensor]:
    """Where each element of each compact parameter comes from: its place among all elements of the uncut parameters.

    Found without trusting any plan or name: the uncut parameters are made to hold their own places while the model is
    cut. Place -1: a zero that the cut wrote itself.
    """
    model = subject.model
    before = [parameter.detach().clone() for parameter in model.parameters()]
    unit = 2.0**-20  # small numbers, so that nothing overflows should the cut run the model
    start = 1
    with torch.no_grad():
        for parameter in model.parameters():
            places = torch.arange(start, start + parameter.numel()).to(parameter)
            parameter.copy_(places.reshape(parameter.shape) * unit)
            start += parameter.numel()
        small = subject.gated.compact(mask)
        for parameter, value in zip(model.parameters(), before):
            parameter.copy_(value)
    return {name: (parameter.detach() / unit).round().long() - 1 for name, parameter in small.named_parameters()}


def rows_kept(subject: Subject, mask: Tensor) -> dict[str, tuple[int, int]]:
    """For each uncut parameter, how many of its rows (first dimension) have an element in the compact model, of all."""
    places = torch.cat([where.reshape(-1) for where in kept(subject, mask).values()])
    found, start = {}, 0
    for name, parameter in subject.model.named_parameters():
        inside = places[(places >= start) & (places < start + parameter.numel())] - start
        found[name] = (len(torch.unique(inside // parameter[0].numel())), len(parameter))
        start += parameter.numel()
    return found


def gradients(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Gradients of a loss that weighs every output element differently, in train mode."""
    model.zero_grad(set_to_none=True)
    with mode(model, True):
        output = flat(call(model, inputs))
        weights = torch.cos(torch.arange(output.numel()).to(output))
        (output * weights).sum().backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def gradient_mismatch(subject: Subject, mask: Tensor) -> tuple[float, float]:
    """How far the compact gradients are from the sliced masked ones, and the largest masked gradient off the slices.

    Both relative to the largest gradient.
    """
    with subject.gated.masked(subject.gated.canonical(mask)):
        expected = torch.cat([g.reshape(-1) for g in gradients(subject.model, subject.inputs).values()])
    found = gradients(subject.gated.compact(mask), subject.inputs)
    scale = expected.abs().max()
    rest, apart = expected.clone(), 0.0
    for name, where in kept(subject, mask).items():
        own = where >= 0
        difference = found[name][own] - expected[where[own]]
        if difference.numel():
            apart = max(apart, float(difference.abs().max()))
        rest[where[own]] = 0.0
    return apart / float(scale), float(rest.abs().max() / scale)


def reload_mismatch(subject: Subject, mask: Tensor) -> float:
    """How far a compact model is from itself after `save` and `load`; 0 when it is the same bit for bit."""
    small = subject.gated.compact(mask)
    with tempfile.TemporaryDirectory() as folder:
        espalier.save(small, folder)
        loaded = espalier.load(folder, subject.entry.build)
    return relative(compact_output(loaded, subject.inputs, False), compact_output(small, subject.inputs, False))


def reasons(gated: Any) -> str:
    """What the library says of this model: gates, couplings, and what is not gated and why."""
    return str(gated.explain(torch.ones(gated.d)))
