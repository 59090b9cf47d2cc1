"""Torch-Pruning as a method of ``evidence.py``: trained whole, cut once or in steps to the same cost, trained on.

Its graph of dependencies, its criteria, its regularisers and its cuts; how many channels go is solved for here, so that
the cost is met. Its own pruner takes a ratio, and leaves a layer whole that would lose every channel: here each layer
keeps its best.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import torch_pruning as tp
from torch import Tensor, nn

from evidence_data import Loader
from evidence_methods import Case, Outcome, train
from evidence_networks import count_widths, layers_of, widths_of

CRITERIA: dict[str, Callable[[], Any]] = {
    "taylor": tp.importance.GroupTaylorImportance,
    "l2": lambda: tp.importance.GroupMagnitudeImportance(p=2),
    "bn": tp.importance.BNScaleImportance,
}
REGULARISERS = {"l2": tp.pruner.GroupNormPruner, "bn": tp.pruner.BNScalePruner}


def groups_of(model: nn.Module, example: Tensor) -> list[Any]:
    """The groups of channels that are cut together, in the order of the widths."""
    graph = tp.DependencyGraph().build_dependency(model, example)
    layers = layers_of(model)
    ordered: list[Any] = [None] * len(layers)
    for group in graph.get_all_groups(ignored_layers=[model.head], root_module_types=[nn.Conv2d, nn.Linear]):
        members = {dep.target.module for dep, _ in group if graph.is_out_channel_pruning_fn(dep.handler)}
        ordered[next(i for i, layer in enumerate(layers) if layer in members)] = group
    return ordered


def kept_channels(
    scores: Sequence[Tensor], limit: float, cost: Callable[[list[int]], float], *, everywhere: bool, least: float
) -> list[Tensor]:
    """For each layer the channels that stay, by their scores ``(channels)``: as many as fit the limit.

    everywhere: scores are compared over all layers, else within each, which loses the same share as all others.
    least: the share of a layer that always stays; one channel does in any case.
    """
    entries = []  # (worth, layer, channel)
    for layer, score in enumerate(scores):
        best = score.argsort(descending=True).tolist()
        safe = max(1, math.ceil(least * len(best)))
        for place, channel in enumerate(best):
            worth = float(score[channel]) if everywhere else 1 - (place + 1) / len(best)
            entries.append((math.inf if place < safe else worth, layer, channel))
    entries.sort(key=lambda entry: -entry[0])

    def widths(number: int) -> list[int]:
        counts = [0] * len(scores)
        for _, layer, _ in entries[:number]:
            counts[layer] += 1
        return counts

    low, high = sum(math.isinf(worth) for worth, _, _ in entries), len(entries)
    if cost(widths(low)) > limit:
        raise ValueError(f"what always stays costs {cost(widths(low)):g}, more than the limit of {limit:g}")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(widths(middle)) <= limit else (low, middle - 1)
    counts, chosen = widths(low), entries[:low]
    full = {layer for layer, score in enumerate(scores) if counts[layer] == len(score)}
    for entry in entries[low:]:  # further channels that fit, the best first; a layer that has no room gets none later
        layer = entry[1]
        if layer not in full:
            larger = [*counts[:layer], counts[layer] + 1, *counts[layer + 1 :]]
            if cost(larger) <= limit:
                counts, chosen = larger, [*chosen, entry]
            else:
                full.add(layer)
    return [torch.tensor(sorted(c for _, own, c in chosen if own == layer)) for layer in range(len(scores))]


def gradients(case: Case, model: nn.Module, loader: Loader, batches: int) -> None:
    """The sum of some batches' gradients, for criteria that read it. They are not counted in the budget."""
    model.eval().zero_grad()
    for _ in range(batches):
        images, labels = loader.next()
        F.cross_entropy(model(images), labels).backward()


def cut(case: Case, model: nn.Module, loader: Loader, limit: float) -> None:
    """Cut a network in place to at most this cost, and as near to it as whole channels allow."""
    setting, kind = case.setting, str(case.cost)
    if setting["criterion"] == "taylor":
        gradients(case, model, loader, setting["batches"])
    groups = groups_of(model, next(case.images.evaluated(2))[0])
    criterion = CRITERIA[setting["criterion"]]()
    scores = [criterion(group).float().cpu() for group in groups]
    kept = kept_channels(
        scores,
        limit,
        lambda widths: count_widths(case.network, widths, case.images.shape)[kind],
        everywhere=setting["global"],
        least=setting["least"],
    )
    for group, score, channels in zip(groups, scores, kept):
        gone = sorted(set(range(len(score))) - set(channels.tolist()))
        if gone:
            group.prune(gone)
    model.zero_grad()
    if widths_of(model) != [len(channels) for channels in kept]:
        raise RuntimeError(f"cut to {widths_of(model)}, not {[len(channels) for channels in kept]}")


def pruned(case: Case) -> Outcome:
    """See ``pruned`` in the settings: dense: the share of the updates before the cut. steps: cuts, spread over ``span``
    of the updates from there on, each a like part of the way. anneal: the rate falls to its end before the first cut
    and starts anew there, times ``fine``; else one schedule goes through."""
    setting, budget = case.setting, case.budget
    if setting["criterion"] not in CRITERIA:
        raise ValueError(f"a criterion is {', '.join(CRITERIA)}, not {setting['criterion']!r}")
    model, loader = case.place(case.start(case.whole)), case.loader()
    dense, steps = round(setting["dense"] * budget.updates), setting["steps"]
    extra = None
    if setting["regularize"]:
        pruner = REGULARISERS[setting["criterion"]](
            model,
            next(case.images.evaluated(2))[0],
            CRITERIA[setting["criterion"]](),
            reg=setting["regularize"],
            ignored_layers=[model.head],
        )
        extra = lambda: pruner.regularize(model)  # noqa: E731
    end = dense if setting["anneal"] else budget.updates
    loss = train(case, model, loader, budget.optimizer(model.parameters(), end), dense, extra)
    whole, limit = case.count()[str(case.cost)], case.limit()
    marks = [dense + round(k * setting["span"] * budget.updates / steps) for k in range(steps)] + [budget.updates]
    fine = replace(budget, lr=budget.lr * setting["fine"]) if setting["anneal"] else budget
    offset = dense if setting["anneal"] else 0
    for step, (start, stop) in enumerate(itertools.pairwise(marks), 1):
        cut(case, model, loader, whole - (whole - limit) * step / steps)
        optimizer = fine.optimizer(model.parameters(), budget.updates - offset, start - offset)
        if stop > start:
            loss = train(case, model, loader, optimizer, stop - start)
    return model, loss, loader.read
