"""What a mask leaves of a network, described for drawing: plain dictionaries of cells, connections and bands.

A drawing is JSON: ``kind`` ("graph" or "layers"), ``title``, ``facts`` (below it), ``notes`` (below the picture),
``cells``, ``edges``, ``bands`` and ``summary`` (the numbers behind the text). It is made without the network itself, so
that a report can draw from a run file's mask alone; :mod:`espalier.picture.render` draws it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from espalier.space import BadInput, BadMask, Bits, Space

Drawing = dict[str, Any]
"""What is there to draw, as a plain dictionary that can be written as JSON."""
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Connection:
    """One gate of a DenseNet. A layer is named by its depth in the original network; the first convolution is 1."""

    source: int
    reader: int
    block: int
    weights: int


def connections(
    layers: int = 12, blocks: int = 3, growth: int = 12, stem: int = 16, classes: int = 10
) -> list[Connection]:
    """The gates of :class:`espalier.models.DenseNet`, in the order of its mask: first what the layers of every block
    read, then what the transitions read, then what the classifier reads.

    >>> gates = connections()
    >>> len(gates), sum(gate.weights for gate in gates)
    (273, 1001184)
    """
    inside, between = list[Connection](), list[Connection]()
    width = stem
    for block in range(blocks):
        start = block * (layers + 1) + 1  # the block's input: the first convolution, or a transition
        sizes = [width, *[growth] * layers]
        width = sum(sizes)
        for reader in range(start + 1, start + layers + 1):
            for source in range(start, reader):
                inside.append(Connection(source, reader, block, sizes[source - start] * growth * 9))
        written = classes if block == blocks - 1 else width
        reader = start + layers + 1
        between += [Connection(start + i, reader, block, size * written) for i, size in enumerate(sizes)]
    return inside + between


def living(gates: Sequence[Connection], opened: Sequence[bool]) -> list[bool]:
    """The canonical mask: open gates between layers that the image reaches and that reach the classifier."""
    last = max(gate.reader for gate in gates)
    steps = sorted((gate.reader, gate.source) for gate, is_open in zip(gates, opened, strict=True) if is_open)
    fed, read = {1}, {last}
    for reader, source in steps:  # a reader lies deeper than its sources, so one pass each way is enough
        if source in fed:
            fed.add(reader)
    for reader, source in sorted(steps, key=lambda step: -step[1]):
        if reader in read:
            read.add(source)
    alive = fed & read
    return [bool(o) and gate.source in alive and gate.reader in alive for gate, o in zip(gates, opened)]


def depths(gates: Iterable[Connection]) -> dict[int, int]:
    """Depth of every layer that these connections touch: the longest path from the first convolution, which has 1."""
    depth = {1: 1}
    for gate in sorted(gates, key=lambda gate: gate.reader):
        depth[gate.reader] = max(depth.get(gate.reader, 0), depth[gate.source] + 1)
    return depth


def densenet(
    mask: str | Iterable[Any],
    *,
    layers: int = 12,
    blocks: int = 3,
    growth: int = 12,
    stem: int = 16,
    classes: int = 10,
    title: str = "",
) -> Drawing:
    """The paper's Fig. 3 for one mask ``(d)``, given as numbers or as the hexadecimal digits of a run file.

    Cells are layers, their ``id`` and ``label`` the depth in the original network, their ``column`` the depth in the
    found one. Layers that are dead under the mask are left out, and so are the connections that lead to them.

    >>> densenet([1] * 273)["facts"]
    ['depth 40', '273 of 273 connections', '100% of the weights']
    """
    if layers < 1 or blocks < 1:
        raise BadInput(f"a DenseNet has at least one block of one layer, not {blocks} of {layers}")
    gates = connections(layers, blocks, growth, stem, classes)
    opened = bits(mask, len(gates))
    alive = living(gates, opened)
    kept = [gate for gate, is_alive in zip(gates, alive) if is_alive]
    at = depths(kept)
    full = blocks * (layers + 1) + 1
    drawn = sorted(at) if kept else []
    total = sum(gate.weights for gate in gates)
    shares = [sum(gate.weights for gate, bit in zip(gates, some) if bit) / total for some in (alive, opened)]
    summary = {
        "depth": at[full] if kept else 0, "full_depth": full, "connections": len(kept), "open": sum(opened),
        "of": len(gates), "weight_share": shares[0], "open_weight_share": shares[1],
        "dead": [layer for layer in range(1, full + 1) if layer not in drawn],
    }  # fmt: skip
    counts = [[sum(gate.block == block for gate in some) for some in (kept, gates)] for block in range(blocks)]
    facts = [f"{some} of {every} connections" for some, every in counts]
    return {
        "kind": "graph", "title": title or f"DenseNet-{full}", "facts": _facts(summary), "notes": _notes(summary),
        "bands": [{"label": f"Block {i}", "fact": fact} for i, fact in enumerate(facts, 1)],
        "cells": [_cell(layer, at[layer], layers, blocks, kept, gates) for layer in drawn],
        "edges": [{"from": gate.source, "to": gate.reader, "band": gate.block} for gate in kept],
        "summary": summary,
    }  # fmt: skip


def _cell(
    layer: int, column: int, layers: int, blocks: int, kept: Sequence[Connection], gates: Sequence[Connection]
) -> Drawing:
    block, place = divmod(layer - 2, layers + 1)  # place: within the block, `layers` being what reads all of it
    role = "layer"
    name = f"layer {place + 1} of block {block + 1}"
    if layer == 1:
        block, role, name = 0, "stem", "first conv"
    elif place == layers:
        role = "classifier" if block == blocks - 1 else "transition"
        name = role if block == blocks - 1 else f"transition {block + 1}"
    counts = {"kept": sum(gate.reader == layer for gate in kept), "total": sum(gate.reader == layer for gate in gates)}
    return {"id": layer, "label": str(layer), "name": name, "role": role, "band": block, "column": column, **counts}


def _facts(summary: Mapping[str, Any]) -> list[str]:
    if not summary["connections"]:
        return ["nothing leads from the image to the classifier"]
    lost = summary["depth"] < summary["full_depth"]
    return [
        f"depth {summary['depth']}" + (f" instead of {summary['full_depth']}" if lost else ""),
        f"{summary['connections']} of {summary['of']} connections",
        f"{share_label(summary['weight_share'])} of the weights",
    ]


def _notes(summary: Mapping[str, Any]) -> list[str]:
    notes = []
    if summary["connections"]:
        notes.append("In a cell: the layer's depth in the original network. Below a column: depth in this one.")
        notes.append("Blue: what reads the block's input. Fainter: connections past one or more columns.")
        if summary["dead"]:
            notes.append("Dead layers, not drawn: " + ", ".join(map(str, summary["dead"])) + ".")
    idle = summary["open"] - summary["connections"]
    if idle:
        notes.append(
            f"{idle} further open {'gate leads' if idle == 1 else 'gates lead'} nowhere, and "
            f"{'is' if idle == 1 else 'are'} not drawn; with {'it' if idle == 1 else 'them'} the mask has "
            f"{summary['open']} connections and {share_label(summary['open_weight_share'])} of the weights."
        )
    return notes


def layers(kept: Mapping[str, Sequence[int]], *, title: str = "", facts: Sequence[str] = ()) -> Drawing:
    """Any model, simply: ``{name: (kept, all)}`` of its groups of gates, in the order they are to stand."""
    cells = [_counted(i, name, pair, "group") for i, (name, pair) in enumerate(kept.items())]
    if not cells:
        raise BadInput("there is no group of gates to draw")
    return _of_layers(cells, title or "Found network", facts, chain=False)


def mlp(
    widths: Sequence[int], units: Sequence[int], *, title: str = "", facts: Sequence[str] = (), unit: str = "units"
) -> Drawing:
    """A perceptron. widths: inputs, hidden layers, outputs; units: how many of each hidden layer are kept.

    >>> drawing = mlp([784, 784, 784, 784, 10], [340, 141, 126])
    >>> drawing["facts"]
    ['607 of 2352 units (25.8%)', '18.0% of the weights']
    """
    if len(widths) != len(units) + 2 or not units:
        raise BadInput(
            f"{len(widths)} widths (inputs, hidden, outputs) and {len(units)} hidden layers do not go together"
        )
    cells = [_counted(0, "inputs", (widths[0], widths[0]), "fixed")]
    cells += [_counted(i + 1, f"layer {i + 1}", (kept, widths[i + 1]), "group") for i, kept in enumerate(units)]
    cells.append(_counted(len(cells), "outputs", (widths[-1], widths[-1]), "fixed"))
    line = [cell["kept"] for cell in cells]
    weights, every = (sum(a * b for a, b in pairwise(some)) for some in (line, list(widths)))
    if not facts:
        known = sum(units) / sum(widths[1:-1])
        facts = [
            f"{sum(units)} of {sum(widths[1:-1])} {unit} ({share_label(known)})",
            f"{share_label(weights / every)} of the weights",
        ]
    return _of_layers(cells, title or "Perceptron", facts, chain=True)


def of_space(space: Space, mask: Iterable[Any], *, title: str = "", facts: Sequence[str] = ()) -> Drawing:
    """Any attached model: ``of_space(gated.space, gated.canonical(mask))``. mask: ``(d)``.

    A choice is a layer of which one option is kept.
    """
    opened = bits(mask, space.d)
    kept = {group.name: (sum(opened[space.slices[group.name]]), group.size) for group in space.groups}
    drawing = layers(kept, title=title, facts=facts)
    for cell, group in zip(drawing["cells"], space.groups):
        if not isinstance(group, Bits):
            cell["note"] = f"option {opened[space.slices[group.name]].index(True) + 1} of {group.size}"
    return drawing


def of_run(record: Mapping[str, Any], *, title: str = "") -> Drawing:
    """Any run: the content of a study's run file, or of the ``result.json`` of a run directory."""
    result = record.get("result", record)
    settings = record.get("settings", {})
    if "kept" in result:
        share = result.get("weight_share")
        facts = [] if share is None else [f"{share_label(share)} of the weights"]
        return layers(result["kept"], title=title, facts=facts)
    epochs = f", {settings['epochs']} epochs" if not title and "epochs" in settings else ""
    title = title or run_title(record)
    if "widths" in settings and "units" in result:
        units = result.get("canonical", result)["units"]
        return mlp(settings["widths"], units, title=title)
    if settings.get("network") == "DenseNet" and "mask" in result:
        layers_of_block = (settings["depth"] - 4) // 3
        return densenet(result["mask"], layers=layers_of_block, growth=settings["growth"], title=title + epochs)
    raise BadInput(
        "a run is drawn from `kept`, from `units` and `widths`, or from the `mask` of a DenseNet; it has none"
    )


def run_title(record: Mapping[str, Any]) -> str:
    """What tells a run of a study from its others, in words."""
    run = record.get("run", {})
    words = [str(record.get("settings", {}).get("dataset", "")), str(run.get("variant", run.get("method", "")))]
    if run.get("penalty") is not None:
        words.append(f"penalty {raised(power(whole_power(run['penalty'])))}")
    words += [f"{name} {run[name]:g}" for name in ("size", "rate", "share") if isinstance(run.get(name), (int, float))]
    if "seed" in run:
        words.append(f"seed {run['seed']}")
    return ", ".join(word for word in words if word)


def _counted(number: int, name: str, pair: Sequence[int], role: str) -> Drawing:
    kept, total = (int(count) for count in pair)
    if not 0 <= kept <= total or total < 1:
        raise BadInput(f"{name!r} keeps {kept} of {total}; it must be between none and all of at least one")
    return {"id": number, "label": str(name), "name": str(name), "role": role, "kept": kept, "total": total}


def _of_layers(cells: list[Drawing], title: str, facts: Sequence[str], *, chain: bool) -> Drawing:
    groups = [cell for cell in cells if cell["role"] == "group"]
    kept, total = (sum(cell[name] for cell in groups) for name in ("kept", "total"))
    every = list(facts) if chain else [f"{kept} of {total} gates ({share_label(kept / total)})", *facts]
    edges = [{"from": a["id"], "to": b["id"]} for a, b in pairwise(cells)] if chain else []
    notes = ["Outlined: the layer as it was. Filled: what is kept."]
    return {
        "kind": "layers", "title": title, "facts": every, "notes": notes, "bands": [], "cells": cells, "edges": edges,
        "summary": {"kept": kept, "of": total},
    }  # fmt: skip


def bits(mask: str | Iterable[Any], d: int) -> list[bool]:
    """A mask of d gates from hexadecimal digits, the first gate the highest bit, or from d numbers 0 and 1.

    >>> bits("a8", 5)
    [True, False, True, False, True]
    """
    if isinstance(mask, str):
        try:
            digits = "".join(f"{int(sign, 16):04b}" for sign in mask)
        except ValueError:
            raise BadMask(f"{mask[:20]!r} is not a mask: it holds other signs than hexadecimal digits") from None
        if len(mask) != -(-d // 4):
            raise BadMask(f"a mask of {d} gates has {-(-d // 4)} hexadecimal digits, not {len(mask)}")
        if "1" in digits[d:]:
            raise BadMask(f"a mask of {d} gates has no open bit beyond them; this one is of a larger network")
        return [digit == "1" for digit in digits[:d]]
    values = [float(value) for value in mask]
    if len(values) != d:
        raise BadMask(f"a mask of this network has {d} entries, not {len(values)}")
    wrong = [value for value in values if value not in (0.0, 1.0)]
    if wrong:
        raise BadMask(f"a mask holds 0 and 1 only, not {wrong[0]:g}")
    return [value == 1.0 for value in values]


# ---- numbers as people write them ------------------------------------------------------------------------------------


def whole_power(value: float) -> float:
    """A power of two that was given in six digits, as that power of two; any other number as it is.

    >>> whole_power(0.00195312) == 2**-9, whole_power(0.3), whole_power(0.0)
    (True, 0.3, 0.0)
    """
    if value == 0 or not math.isfinite(value):
        return value
    nearest = math.copysign(2.0 ** round(math.log2(abs(value))), value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-5) else value


def power(value: float) -> str:
    """A penalty as the paper writes it.

    >>> power(2**-6), power(-1.0), power(0.0), power(0.3)
    ('2^-6', '-2^0', '0', '0.3')
    """
    fraction, exponent = math.frexp(abs(value))
    if fraction != 0.5 or not -40 < exponent < 42:
        return f"{value:g}" if value else "0"
    return f"{'-' if value < 0 else ''}2^{exponent - 1}"


def raised(text: str) -> str:
    """Powers as they are printed.

    >>> raised("penalty -2^-3")
    'penalty -2⁻³'
    """
    return re.sub(r"\^(-?\d+)", lambda exponent: exponent[1].translate(RAISED), text)


def share_label(share: float) -> str:
    """A share with one decimal, all and nothing without.

    >>> share_label(0.4231), share_label(1.0), share_label(0.0), share_label(0.99996)
    ('42.3%', '100%', '0%', '>99.9%')
    """
    if share in (0, 1):
        return f"{share:.0%}"
    return "<0.1%" if share < 0.0005 else ">99.9%" if share > 0.9995 else f"{share:.1%}"
