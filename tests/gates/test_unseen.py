"""Layers that the example never reaches: units that they may read or write are not offered."""

import pytest
import torch
from torch import nn

import espalier


class Reaches(nn.Module):
    """A body, and one of several ways behind it, as the call asks."""

    def __init__(self, body, **ways):
        super().__init__()
        self.body, self.ways = body, nn.ModuleDict(ways)

    def forward(self, x, way="a"):
        return self.ways[way](torch.relu(self.body(x)))


def deep(width):
    return nn.Sequential(nn.Linear(width, 6), nn.ReLU(), nn.Linear(6, 3))


UNSEEN = {
    "deeper": lambda: Reaches(nn.Linear(4, 10), a=nn.Linear(10, 3), b=deep(10)),
    "a norm": lambda: Reaches(nn.Linear(4, 10), a=nn.Linear(10, 3), b=nn.BatchNorm1d(10)),
    "maps, flattened": lambda: Reaches(
        nn.Conv1d(4, 10, 1),
        a=nn.Sequential(nn.Conv1d(10, 3, 1), nn.Flatten()),
        b=nn.Sequential(nn.Flatten(), nn.Linear(50, 3)),
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_units_that_an_unseen_layer_may_read_stay(name):
    x = torch.randn(2, 4, 5) if "maps" in name else torch.randn(2, 4)
    with pytest.raises(espalier.NoGates, match=r"body: ways\.b.* was never used by the example in eval mode"):
        espalier.attach(UNSEEN[name](), x)


def test_other_widths_and_what_ran_have_no_part_in_it():
    class Inner(nn.Module):
        """It ran, and has a layer that nothing calls any more."""

        def __init__(self):
            super().__init__()
            self.used, self.old = nn.Linear(10, 3), nn.Linear(10, 10)

        def forward(self, x):
            return self.used(x)

    model = Reaches(nn.Linear(4, 12), a=nn.Sequential(nn.Linear(12, 10), nn.ReLU(), Inner()), b=deep(7))
    gated = espalier.attach(model, torch.randn(2, 4))
    assert list(gated.space.slices) == ["body"]
    assert "ways.a.2.old.weight was never used" in " ".join(gated.refused["ways.a.0"].split())
