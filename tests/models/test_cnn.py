"""The small convolutional network: its shapes, its gates, and what is left of it when it is cut."""

import pytest
import torch

import espalier
from espalier.models import CNN


@pytest.mark.parametrize(("side", "channels"), [(8, 1), (28, 1), (32, 3), (3, 1)])
def test_it_reads_small_images_of_any_size(side, channels):
    model = CNN(channels, (4, 6, 8), 5).eval()
    assert model(torch.rand(2, channels, side, side)).shape == (2, 5)


def test_every_channel_has_a_gate_and_cut_ones_are_gone():
    model, x = CNN(1, (4, 6), 3), torch.rand(8, 1, 8, 8)
    model(x)
    gated = espalier.attach(model.eval(), x)
    assert gated.d == 4 + 6
    mask = torch.tensor([1, 0, 1, 0, 1, 1, 0, 0, 0, 1.0])
    small = gated.compact(mask)
    assert [block[0].out_channels for block in small.blocks] == [2, 3]
    with gated.masked(mask):
        torch.testing.assert_close(model(x), small.eval()(x))
    assert float(gated.cost("macs")(mask)) == 8 * (2 * 9 * 64 + 3 * 2 * 9 * 16 + 3 * 3)


def test_no_width_is_refused():
    with pytest.raises(espalier.BadInput, match="at least one width"):
        CNN(1, ())
