"""Explaining gates: what each layer keeps, what is coupled to what, and what is not gated and why."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import numpy as np
import torch

from espalier.gates.costs import computed_elements, computed_weights, elements
from espalier.gates.trace import Array

if TYPE_CHECKING:
    from espalier.gates.gated import Gated

WIDTH = 80


def explain(gated: Gated, mask: Array | None) -> str:
    """mask: ``(d)``, canonical, or None for all open. Readable in 80 columns."""
    structure, space = gated.structure, gated.space
    opened = structure.whole() if mask is None else mask
    count = len(space.groups)
    lines = [f"{type(gated.model).__name__}: {space.d} gates in {count} group{'s' * (count != 1)}", ""]
    lines.append(f"{'group':<34}{'kind':<10}{'before':>8}{'after':>8}{'share':>8}{'least':>8}")
    for group in structure.groups:
        where = space.slices[group.name]
        before, after = int(group.widths.sum()), int(group.widths @ opened[where])
        least = int(np.sort(group.widths)[: group.least].sum())
        lines.append(f"{_fit(group.name, 33):<34}{group.kind:<10}{before:>8}{after:>8}{after / before:>8.1%}{least:>8}")
        if group.blocks:
            last = f", one of {group.blocks[-1]}" if group.blocks[-1] != group.blocks[0] else ""
            whole = group.size - bool(last)
            lines.append(f"  {whole} gates open {group.blocks[0]} of these each{last}, alike in importance")
        if group.name in structure.learned.padded:
            lines.append("  its layers are cut; the code between them keeps its width, with zeros")
    lines += ["", "coupled: what is written and read together"]
    for group in structure.groups:
        lines.append(f"  {_fit(group.name, 76)}")
        lines += _wrapped("    written by ", group.writes)
        lines += _wrapped("    read by    ", group.reads)
    lines += ["", f"{'layer':<40}{'before':>13}{'after':>13}{'share':>8}"]
    theta = torch.as_tensor(opened, dtype=torch.float64)
    ones = torch.as_tensor(structure.whole())
    layers = {
        structure.trace.tensors[number].name: elements(structure, number, ())
        for number in dict.fromkeys(event.weight for event in structure.trace.events)
    }
    layers |= {f"{e.module} (computed)": computed_elements(structure, e, ()) for e in computed_weights(structure)}
    lines += [_row(name, cost(ones).item(), cost(theta).item()) for name, cost in layers.items()]
    lines.append("")
    totals = {kind: gated.cost(kind) for kind in ("weights", "macs", "parameters")}
    lines += [_row(kind, cost(ones).item(), cost(theta).item()) for kind, cost in totals.items()]
    if structure.trace.products:
        full, now = (_products(gated, m) for m in (structure.whole(), opened))
        lines.append(_row("products of two activations (attention)", full, now))
    lines.append("macs: linear maps and convolutions, on the example inputs as given (whole batch)")
    why = gated.one_at_a_time()
    if why:
        text = f"several masks run one at a time, not in one pass: {why}"
        lines += ["", *textwrap.wrap(text, WIDTH, subsequent_indent="  ")]
    lines += _not_gated(gated)
    return "\n".join(lines)


def _row(name: str, full: float, now: float) -> str:
    return f"{_fit(name, 39):<40}{full:>13,.0f}{now:>13,.0f}{now / max(full, 1):>8.1%}"


def _products(gated: Gated, opened: Array) -> float:
    """Multiplications between activations, which are in no cost: stated apart."""
    total, opened = 0.0, opened.copy()
    for name in gated.structure.learned.padded:  # zeros are multiplied, too
        opened[gated.space.slices[name]] = 1.0
    for event in gated.structure.trace.products:
        lengths = [np.where(e < 0, True, opened[e] != 0).sum() for e in map(gated.structure.follow, event.rows)]
        total += event.uses * float(np.prod(lengths))
    return total


def _not_gated(gated: Gated) -> list[str]:
    """Refused groups, and outputs of layers that are always kept, by reason."""
    trace = gated.structure.trace
    unused = [info.name for info in trace.tensors if info.is_parameter and not info.touched]
    texts = [f"{name}: {why}" for name, why in gated.refused.items()]
    texts += [f"{why}: {', '.join(names)}" for why, names in trace.frozen_axes().items()]
    texts += [f"{_fit(name, 50)}: never used by the example" for name in unused]
    texts += [
        f"operation `{name}` has no rule (in {', '.join(sorted(where))})" for name, where in trace.unknown.items()
    ]
    wrapped = [textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ") for text in texts]
    return ["", "not gated, and why", *(line for lines in wrapped for line in lines)] if texts else []


def _wrapped(lead: str, names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    shown = names if len(names) <= 12 else (*names[:12], f"and {len(names) - 12} more")
    return textwrap.wrap(
        lead + ", ".join(shown), WIDTH, subsequent_indent=" " * len(lead), break_long_words=True, break_on_hyphens=False
    )


def _fit(name: str, width: int) -> str:
    return name if len(name) <= width else ".." + name[-(width - 2) :]
