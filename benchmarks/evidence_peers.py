"""Other libraries as methods of ``evidence.py``.

Torch-Pruning: a network is trained whole, cut once or in steps to the same cost, trained on. Its graph of dependencies,
its criteria, its regularisers and its cuts; how many channels go is solved for here, so that the cost is met. Its own
pruner takes a ratio, and leaves a layer whole that would lose every channel: here each layer keeps its best.

ModelOpt's FastNAS (nvidia-modelopt 0.47, with torchprofile 0.0.4): the same course, its own search for the widths.

OTO's HESSO (only-train-once 3.0.1): one course of training, in which it drives channels to zero. It takes a share of
all channels; here each period takes as many as bring the cost down by its part of the way.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

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
    if setting["criterion"] == "fastnas":
        return searched(case, model, loader, limit)
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


def searched(case: Case, model: nn.Module, loader: Loader, limit: float) -> None:
    """ModelOpt makes a network narrower in place. Its cost is FLOPs, two for each MAC, or parameters; its widths are 20
    shares of a layer's own, rounded to a multiple of ``divisor``. Its score is of training images."""
    import modelopt.torch.prune as mtp

    if case.cost not in ("macs", "parameters"):
        raise ValueError(f"ModelOpt has no target on {case.cost}, only on macs and parameters")
    constraints = {"flops": 2 * limit} if case.cost == "macs" else {"params": limit}
    batches = [loader.next() for _ in range(case.setting["batches"])]
    wrong = F.cross_entropy if case.setting["score"] == "loss" else lambda y, t: (y.argmax(1) != t).float().mean()

    @torch.no_grad()
    def score(network: nn.Module) -> float:
        return -sum(float(wrong(network(images), labels)) for images, labels in batches) / len(batches)

    config = mtp.fastnas.FastNASConfig()
    for kind, name in (("Conv2d", "channel_divisor"), ("BatchNorm2d", "feature_divisor")):
        config[f"nn.{kind}"]["*"][name] = case.setting["divisor"]
    # It keeps fifty batches and calibrates by them at every width, so they are small.
    pieces = [part for images, _ in batches for part in images.split(16)]
    options = {"data_loader": pieces, "collect_func": lambda part: part, "score_func": score}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result, _ = mtp.prune(model, [("fastnas", config)], constraints, next(case.images.evaluated(1))[0], options)
    if result is not model:
        raise RuntimeError("the network was not made narrower in place")


def pruned(case: Case) -> Outcome:
    """See ``pruned`` in the settings: dense: the share of the updates before the cut. steps: cuts, spread over ``span``
    of the updates from there on, each a like part of the way. anneal: the rate falls to its end before the first cut
    and starts anew there, times ``fine``; else one schedule goes through."""
    setting, budget = case.setting, case.budget
    if setting["criterion"] not in (*CRITERIA, "fastnas"):
        raise ValueError(f"a criterion is {', '.join(CRITERIA)} or fastnas, not {setting['criterion']!r}")
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
    return Outcome(model, loss, loader.read)


@contextlib.contextmanager
def names_of_old() -> Any:
    """What OTO reads of torch under names that are gone there, and ``.cuda()``, which it calls on a CPU too."""
    inside = "torch.onnx._internal.torchscript_exporter"
    sys.modules.setdefault("torch.onnx._globals", importlib.import_module(f"{inside}._globals"))
    optimize = importlib.import_module(f"{inside}.utils")._optimize_graph
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.onnx, "_optimize_graph", optimize, create=True))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield


CHOSEN = ("active_num_redundant_groups", "active_redundant_idxes", "important_idxes", "pruned_group_idxes",
          "pruned_idxes", "target_num_redundant_groups")  # fmt: skip


def meet(case: Case, model: nn.Module, optimizer: Any) -> None:
    """From now on each period of HESSO's pruning takes the fewest channels that bring the cost down by its part."""
    identify, kind = optimizer.identify_redundant_groups, str(case.cost)
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    groups = [
        next(group["id"] for group in optimizer.param_groups if names[layer] in group["p_names"])
        for layer in layers_of(model)
    ]
    whole = case.count()[kind]

    def sized() -> None:
        period, before = optimizer.curr_pruning_period, {name: getattr(optimizer, name) for name in CHOSEN}

        def cost(number: int) -> int:
            for name, value in before.items():
                setattr(optimizer, name, copy.deepcopy(value))
            optimizer.active_num_redundant_groups[period] = number
            identify()
            return case.count([len(optimizer.important_idxes[group]) for group in groups])[kind]

        limit = whole - (whole - case.limit()) * (period + 1) / optimizer.pruning_periods
        low, high = 0, optimizer.total_num_groups - len(before["pruned_group_idxes"])
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if cost(middle) <= limit else (middle + 1, high)
        cost(low)

    optimizer.identify_redundant_groups = sized


def oto(case: Case) -> Outcome:
    """See ``oto`` in the settings. The optimiser is its own, of the kind "sgd": momentum without Nesterov's step."""
    setting, budget = case.setting, case.budget
    model, loader = case.place(case.start(case.whole)), case.loader()
    inputs = next(case.images.evaluated(8))[0]
    with names_of_old():
        from only_train_once import OTO

        rival = OTO(model, dummy_input=inputs)
        optimizer = rival.hesso(
            variant="sgd",
            lr=budget.lr,
            first_momentum=0.9,
            weight_decay=budget.weight_decay,
            target_group_sparsity=1.0,
            start_pruning_step=round(setting["start"] * budget.updates),
            pruning_steps=round(setting["span"] * budget.updates),
            pruning_periods=setting["periods"],
            group_divisible=setting.get("divisible", 1),
        )
        meet(case, model, optimizer)
        loss = train(case, model, loader, budget.scheduled(optimizer, budget.updates), budget.updates)
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            expected = model.eval()(inputs)
            rival.construct_subnet(out_dir=folder, save_full_group_sparse_model=False)
            torch.testing.assert_close(model(inputs), expected, rtol=1e-3, atol=1e-3)
    return Outcome(model, loss, loader.read)
