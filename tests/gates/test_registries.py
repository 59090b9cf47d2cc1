"""Kinds of cost and of gates that others add: known by name everywhere, refused by name where they are wrong."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

import espalier
from espalier import Bits, Cost, Space
from espalier.gates import costs, find, find_groups, register_cost, register_kind


@pytest.fixture(autouse=True)
def as_before():
    """What a test registers is gone after it, and what others did is not there."""
    built_in = {"weights", "macs", "units", "parameters", "channels", "heads", "branches", "inputs"}
    with patch.dict(costs.KINDS), patch.dict(find.KINDS):
        for table in (costs.KINDS, find.KINDS):
            for name in table.keys() - built_in:
                del table[name]
        yield


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3))


def tiles(gated):
    parts = [Cost.of_widths(gated.space, {g.name: lambda w: -(-w // 4)}) for g in gated.space.groups]
    return sum(parts[1:], parts[0])


def test_a_registered_cost_works_by_its_name():
    register_cost("tiles", tiles)
    register_cost("tiles", tiles)  # the same again, as when a module is loaded twice
    gated = espalier.attach(network(), torch.randn(2, 6))
    assert gated.cost("tiles")(torch.ones(28)).item() == 7
    data = torch.randn(40, 6), torch.randint(3, (40,))
    result = espalier.fit(
        gated, data, loss=nn.functional.cross_entropy, epochs=3, cost="tiles", target=0.6, batch_size=20, quiet=True
    )
    assert result.search.cost(result.mask) <= 0.6 * 7


def test_a_cost_of_ones_own_is_taken_as_it_is():
    gated = espalier.attach(network(), torch.randn(2, 6))
    own = Cost.linear(torch.arange(28.0))
    assert gated.cost(own)(torch.ones(28)) == own(torch.ones(28))
    with pytest.raises(espalier.BadInput, match="27 entries"):
        gated.cost(Cost.linear(torch.ones(27)))
    with pytest.raises(espalier.BadInput, match="another space"):
        gated.cost(Cost.of_widths(Space([Bits("a", 28)]), {"a": range(29)}))


def test_costs_that_are_none():
    gated = espalier.attach(network(), torch.randn(2, 6))
    with pytest.raises(espalier.BadInput, match="weights, macs, units, parameters, latency, not 'milliseconds'"):
        gated.cost("milliseconds")
    register_cost("numbers", lambda gated: 3.0)
    with pytest.raises(espalier.BadInput, match="'numbers' gave float"):
        gated.cost("numbers")
    with pytest.raises(espalier.BadInput, match="'weights' already"):
        register_cost("weights", tiles)
    with pytest.raises(espalier.BadInput, match="a name and a function"):
        register_cost("weights", 3)


def pairs(trace, modules):
    """Two units of a found group at a time."""
    groups = []
    for group in find_groups(trace, ("units",), modules):
        units = tuple(np.concatenate(group.units[i : i + 2]) for i in range(0, group.size, 2))
        groups.append(replace(group, kind="pairs", units=units))
    return groups


def test_a_registered_kind_of_gates_is_found_tried_and_cut():
    register_kind("pairs", pairs)
    model = network().double()
    gated = espalier.attach(model, torch.randn(2, 6, dtype=torch.float64), kinds=("pairs",))
    assert gated.space == Space([Bits("0", 8, 1), Bits("2", 6, 1)])
    mask = torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0])
    small = gated.compact(mask)
    assert (small[0].out_features, small[2].out_features) == (6, 4)
    x = torch.randn(5, 6, dtype=torch.float64)
    with gated.masked(mask):
        assert torch.allclose(model(x), small(x), rtol=1e-9)
    weights = sum(p.numel() for name, p in small.named_parameters() if name.endswith("weight"))
    assert gated.cost("weights")(mask).item() == weights


def test_kinds_of_gates_that_do_not_go():
    x = torch.randn(2, 6)
    with pytest.raises(espalier.BadInput, match="units, channels, heads, branches, inputs, not 'pairs'"):
        espalier.attach(network(), x, kinds=("pairs",))
    register_kind("pairs", pairs)
    with pytest.raises(espalier.BadInput, match="two kinds, 'units' and 'pairs'"):
        espalier.attach(network(), x, kinds=("units", "pairs"))
    with pytest.raises(espalier.BadInput, match="'units' already"):
        register_kind("units", pairs)
    with pytest.raises(espalier.BadInput, match="a name and a function"):
        register_kind(3, pairs)
    register_kind("others", lambda trace, modules: pairs(trace, modules))
    with pytest.raises(espalier.BadInput, match="registered for another"):
        espalier.attach(network(), x, kinds=("others",))
