"""What size a run is to end at: a share of a cost, an absolute amount such as "3 ms", or several costs at once."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from espalier.cost import Cost
from espalier.search import Search, selection
from espalier.space import BadInput, BadType, Unreachable

Target = float | str | Mapping[str | Cost, float | str]
PREFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
BINARY = {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
UNITS = {
    "ms": ("latency", 1.0), "us": ("latency", 1e-3), "s": ("latency", 1e3),
    "parameters": ("parameters", 1.0), "params": ("parameters", 1.0), "weights": ("weights", 1.0),
    "units": ("units", 1.0), "gates": ("units", 1.0), "macs": ("macs", 1.0),
    "b": ("bytes", 1.0), "bytes": ("bytes", 1.0), **{name: ("bytes", size) for name, size in BINARY.items()},
}  # fmt: skip
UNIFORM = "uniform"  # a limit: what the cost is of a network of one share of all widths that meets the target
NEAR = 0.95  # of a limit on a measured cost: a network that takes more is measured twice
EXAMPLES = '"250k parameters", "30 MMACs", "10 MB" or "3 ms"'


@dataclass(frozen=True)
class Asked:
    """cost: what the target is of. name: its kind, or "given". share: of the full cost, None where none was asked for.
    limits: further costs and the shares that what ships never exceeds, one or one for each run. words: as it was given,
    where that was no number."""

    cost: Any
    name: str
    share: Any
    limits: dict[str, tuple[Cost, Any]] = field(default_factory=dict)
    words: Any = None


def kinds_of(target: Any) -> tuple[str, ...]:
    """Which costs a target names itself; none where it is a share of whatever cost is given."""
    if isinstance(target, str):
        target = _of_text(target)
    if isinstance(target, Mapping):
        return tuple(_names(target))
    return () if not isinstance(target, str) else (_amount(target)[0],)


def read(gated: Any, cost: Any, target: Any) -> Asked:
    """What ``fit``, ``sweep``, ``shape`` and the command line are given as target, over the gates of a model.

    cost: the kind of cost, or one's own, of a target that names none.
    target: a share of the full cost; an amount such as "250k parameters", "30 MMACs" (for one example), "10 MB" (of
        parameters) or "3 ms"; or a dict from kinds of cost, or costs that ``gated.cost`` gave, to either, the first of
        which is the target and the others limits, which what ships never exceeds; as text "macs=0.4,weights=0.5". A
        limit may be "uniform": what that cost is of a network with one share of all widths that meets the target. A
        latency may name its runtime and batch, as "latency:onnxruntime:64".
    """
    words = target
    if isinstance(target, str):
        target = _of_text(target)
    if isinstance(target, Mapping):
        if not target:
            raise BadInput('a target of several costs names at least one, as {"macs": 0.4, "weights": 0.5}')
        if cost not in ("weights", next(iter(target))) if isinstance(cost, str) else True:
            raise BadInput(f"target={words!r} names its costs itself; leave cost away")
        (kind, value), *others = target.items()
        first, share = _one(gated, kind, value)
        name, *names = _names(target)
        limits = {
            own: _uniform(gated, kind, first, share) if value == UNIFORM else _one(gated, kind, value)
            for own, (kind, value) in zip(names, others, strict=True)
        }
        return Asked(first, name, share, limits, dict(zip((name, *names), target.values(), strict=True)))
    if isinstance(target, str):
        kind = _amount(target)[0]
        if isinstance(cost, str):
            if kind != "bytes" and _family(cost) not in ("weights", kind):
                raise BadInput(f"target={target!r} is an amount of {kind}, but cost={cost!r}; leave cost away")
            cost = "parameters" if kind == "bytes" else cost if _family(cost) == kind else kind
        first, share = _one(gated, cost, target)
        return Asked(first, cost if isinstance(cost, str) else "given", share, {}, target)
    if target is not None and not isinstance(target, (int, float, np.number, Tensor)):
        raise BadType(f"target is a share of the full cost, an amount such as {EXAMPLES}, or a dict, not {target!r}")
    if isinstance(cost, str):
        return Asked(gated.cost(cost), cost, target)
    return Asked(cost if cost is None or isinstance(cost, Cost) else Cost.linear(cost), "given", target)


def _names(kinds: Iterable[str | Cost]) -> list[str]:
    """One for each cost, none of them twice, nor that of the target."""
    names = list[str]()
    for kind in kinds:
        own = kind.label or "given" if isinstance(kind, Cost) else str(kind)
        numbered = (f"{own} {count}" for count in itertools.count(2))
        names.append(next(name for name in itertools.chain([own], numbered) if name not in ("target", *names)))
    return names


def _family(kind: str) -> str:
    """The kind of cost, without what else is asked for: "latency" of "latency:onnxruntime:64"."""
    return kind.partition(":")[0]


def _of_text(text: str) -> Any:
    """A dict of "macs=0.4,weights=0.5"; a number of "0.4" and "40%"; an amount stays text."""
    if "=" in text:
        pairs = [part.partition("=") for part in text.split(",")]
        if len({kind.strip() for kind, _, _ in pairs}) < len(pairs):
            raise BadInput(f"the target {text!r} names a cost twice")
        return {kind.strip(): _of_text(value.strip()) for kind, _, value in pairs}
    if re.fullmatch(r"\s*[0-9.]+(e[+-]?\d+)?\s*%?\s*", text):
        return float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    return text


def _amount(text: str) -> tuple[str, float]:
    """The kind of cost an amount is of, and the number in that cost's own units.

    >>> _amount("250k parameters"), _amount("30 MMACs"), _amount("10 MB"), _amount("3 ms")
    (('parameters', 250000.0), ('macs', 30000000.0), ('bytes', 10000000.0), ('latency', 3.0))
    """
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)  # 5,000 as we print it
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([kKMGT]?)\s+([A-Za-z]+)\s*|\s*([0-9.]+)([A-Za-z]+)\s*", plain)
    if match is None:
        raise BadInput(f"a target is a share such as 0.25 or 25%, or an amount such as {EXAMPLES}, not {text!r}")
    number, prefix, unit = (match[1], match[2], match[3]) if match[1] else (match[4], "", match[5])
    scale, word = PREFIXES.get(prefix.lower(), 1.0), unit.lower()
    if word not in UNITS and word[:1] in PREFIXES and word[1:] in UNITS:
        scale, word = scale * PREFIXES[word[0]], word[1:]
    if word not in UNITS:
        raise BadInput(f"the target {text!r} has no unit that is known; amounts are such as {EXAMPLES}")
    try:
        value = float(number) * scale * UNITS[word][1]
    except ValueError:
        raise BadInput(f"the target {text!r} begins with a number, such as {EXAMPLES}") from None
    return UNITS[word][0], value


def _one(gated: Any, kind: str | Cost | Sequence[float] | Tensor, value: float | str) -> tuple[Cost, float]:
    """A cost, and the share of it that is asked for."""
    name = kind if isinstance(kind, str) else "the cost given"
    cost = gated.cost(kind) if isinstance(kind, (str, Cost)) else Cost.linear(kind)
    value = _of_text(value) if isinstance(value, str) else value
    if not isinstance(value, str):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise BadInput(f"the target of {name} is a share in (0, 1] or an amount such as {EXAMPLES}, not {value!r}")
        return cost, float(value)
    unit, amount = _amount(value)
    if unit == "bytes":
        if kind not in ("parameters", "weights"):
            raise BadInput(f"{value!r} is a size of parameters, not of {name}")
        amount /= max(parameter.element_size() for parameter in gated.model.parameters())
    elif isinstance(kind, str) and _family(kind) in {known for known, _ in UNITS.values()} and unit != _family(kind):
        raise BadInput(f"{value!r} is an amount of {unit}, not of {name}")
    if unit == "macs" and isinstance(kind, str):  # an amount is of one example, the cost of all that were attached with
        amount *= gated.examples
    bounds = (selection.most_expensive, selection.cheapest)
    full, least = (float(cost(bound(gated.space, cost, torch.device("cpu")))) for bound in bounds)
    if amount < least:
        per = gated.examples if unit == "macs" and isinstance(kind, str) else 1
        raise Unreachable(
            f"target {value!r} is below the smallest that can be reached: {least / per:,.6g} of {full / per:,.6g} "
            f"{'ms' if unit == 'latency' else name} always stay (what no gate cuts)"
        )
    share = min(amount / full, 1.0)
    while share * full < amount and share < 1:  # not a gate less for a last digit
        share = math.nextafter(share, 1.0)
    return cost, share


def _uniform(gated: Any, kind: str | Cost, first: Cost, most: float) -> tuple[Cost, float]:
    """A cost, and the share of it that every gate open with one probability takes in expectation, the largest under
    which the first cost is at most this share of itself. So widths need not be whole, as those of blocks would be. No
    group has less than must stay of it: of few blocks that is much, and the limit could not be met."""
    space = gated.space
    if not space.is_bits:
        raise BadInput(f"{UNIFORM!r} is a network of one share of all widths; a space with choices has none")
    cost, everything = gated.cost(kind), torch.ones(space.d, dtype=torch.float64)
    stays = torch.cat([everything[where] * group.least / group.size for group, where in space.bits])
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if first(stays.clamp(min=middle)) <= most * first(everything) else (low, middle)
    smallest = cost(selection.cheapest(space, cost, torch.device("cpu")))
    return cost, float(torch.maximum(cost(stays.clamp(min=high)), smallest) / cost(everything))


# ---- costs that were measured, measured again on the network that would ship -----------------------------------------


def measured_again(
    search: Search,
    gated: Any,
    model: nn.Module,
    mask: Any,
    errors: Mapping[str, float] | None = None,
    names: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Of every measured cost what was predicted of a compact model and what is measured now, in milliseconds; a cost
    that is only counted has no row.

    errors: by cost how much longer than predicted the network took that was selected and measured before this one.
    names: of the costs that are measured; None: all.
    compared: measured, as it would be if the whole network took what it took when the cost was measured; a machine that
    is busier now, or clocked otherwise, changes both. smallest: of the smallest network, compared alike. most: what the
    target or limit allows.
    """
    rows = []
    for name, (cost, most) in search.budgets().items():
        latency = getattr(gated, "latencies", {}).get(cost.label)
        if latency is None or (names is not None and name not in names):
            continue
        least = selection.cheapest(gated.space, cost, mask.device).to(mask.dtype)
        others = {"full": mask.new_ones(mask.shape), "least": gated.canonical(least)}
        times = latency.measure({"small": model} | {key: gated.compact(one) for key, one in others.items()})
        then = latency.full / times["full"]
        compared, allowed = times["small"] * then, float(most)
        if allowed >= float(cost(others["full"])) * (1 - 1e-6):  # the whole network is allowed, whatever it takes now
            allowed = max(allowed, compared)
        rows.append(
            {
                "name": name,
                "runtime": latency.runtime,
                "batch": latency.batch,
                "predicted": float(cost(mask)) * (errors or {}).get(name, 1.0),
                "measured": times["small"],
                "full": times["full"],
                "compared": compared,
                "smallest": times["least"] * then,
                "most": allowed,
                "residual": latency.residual,
            }
        )
    return rows


def correct(search: Search, gated: Any) -> tuple[int, dict[str, float]]:
    """Lower what measured costs may be until the network that would ship meets each of them by measurement: select
    again with the measured errors, and below them by more and more, down to the smallest. A clock has noise: what is
    near its limit has to meet it twice. Returns how often something was lowered, and by cost the error that the last
    selection was made with."""
    errors: dict[str, float] = {}
    if search.target is None or not getattr(gated, "latencies", None):
        return 0, errors
    rounds, lowered = 0, Counter[str]()
    while True:
        mask = gated.canonical(search.select())
        model = gated.compact(mask).eval()
        rows = measured_again(search, gated, model, mask)
        near = [row["name"] for row in rows if NEAR * row["most"] < row["compared"] <= row["most"]]
        if near and all(row["compared"] <= row["most"] for row in rows):  # by luck, or really?
            rows = measured_again(search, gated, model, mask, names=near)
        moved = False
        for row in (row for row in rows if row["compared"] > row["most"]):
            name = row["name"]
            if search.tighten(name, 0.995 ** (2 ** lowered[name]) * row["most"] / row["compared"]):
                errors[name] = row["compared"] / row["predicted"]
                lowered[name] += 1
                moved = True
        if not moved:
            return rounds, errors
        rounds += 1
