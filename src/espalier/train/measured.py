"""Costs that were measured, measured again on the network that would ship: before its structure is fixed, and at the
end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from espalier.search import Search

ROUNDS = 5  # selections that are tried


def again(
    search: Search, gated: Any, model: nn.Module, mask: Any, errors: Mapping[str, float] = MappingProxyType({})
) -> dict[str, Any] | None:
    """What was predicted of a compact model and what is measured now, in milliseconds; None of a cost that is only
    counted.

    errors: by cost how much longer than predicted the network took that was selected and measured before this one.
    compared: measured, as it would be if the whole network took what it took when the cost was measured; a machine that
    is busier now, or clocked otherwise, changes both. most: what the target or limit allows.
    """
    rows = []
    for name, (cost, most) in search.budgets().items():
        latency = getattr(gated, "latencies", {}).get(cost.label)
        if latency is None:
            continue
        whole = gated.compact(mask.new_ones(mask.shape))
        times = latency.measure({"small": model, "full": whole})
        rows.append(
            {
                "name": name,
                "runtime": latency.runtime,
                "batch": latency.batch,
                "predicted": float(cost(mask)) * errors.get(name, 1.0),
                "measured": times["small"],
                "full": times["full"],
                "compared": times["small"] * latency.full / times["full"],
                "most": float(most),
                "residual": latency.residual,
            }
        )
    return max(rows, key=lambda row: row["compared"] / row["most"]) if rows else None


def correct(search: Search, gated: Any) -> tuple[int, dict[str, float]]:
    """Lower what a measured cost may be until the network that would ship meets it by measurement: select again with
    the measured error. Returns how often that was, and by cost the error that the last selection was made with. A
    network that still misses it after some rounds ships as it is, and its result says so."""
    errors: dict[str, float] = {}
    if search.target is None or not getattr(gated, "latencies", None):
        return 0, errors
    for round_ in range(ROUNDS):
        mask = gated.canonical(search.select())
        row = again(search, gated, gated.compact(mask).eval(), mask)
        if row is None or row["compared"] <= row["most"]:
            return round_, errors
        if not search.tighten(row["name"], 0.995 * row["most"] / row["compared"]):
            return round_, errors
        errors[row["name"]] = row["compared"] / row["predicted"]
    return ROUNDS, errors
