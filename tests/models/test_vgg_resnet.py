"""VGG-16 and the ResNets for small images: their shapes, their gates, and compact ones built again from widths."""

import pytest
import torch

import espalier
from espalier.models import VGG, ResNet

NARROW = (3, 2, 4, 3, 5, 4, 6, 5, 4, 5, 6, 4, 7)


def again(small):
    """The same class, from scratch, with the widths of a compact network."""
    if isinstance(small, VGG):
        return VGG(small.widths)
    return ResNet(2 * len(small.inner) + 2, small.streams, small.inner)


@pytest.mark.parametrize(
    ("build", "gates"), [(VGG, 4224), (lambda: ResNet(20), 448), (lambda: ResNet(56), 1120)], ids=["16", "20", "56"]
)
def test_every_channel_has_a_gate(build, gates):
    gated = espalier.attach(build(), torch.rand(2, 3, 32, 32), check=False)
    assert gated.d == gates
    assert not gated.refused


@pytest.mark.parametrize("build", [lambda: VGG(NARROW), lambda: ResNet(14, (4, 6, 8), (3, 5, 4, 7, 8, 6))])
@pytest.mark.parametrize("side", [16, 32])
def test_a_compact_network_has_the_widths_of_one_built_from_scratch(build, side):
    torch.manual_seed(0)
    model, x = build(), torch.rand(4, 3, side, side)
    assert model(x).shape == (4, 10)
    gated = espalier.attach(model, x)
    for chance in (0.3, 0.7):
        mask = gated.canonical((torch.rand(gated.d) < chance).float())
        small = gated.compact(mask)
        scratch = again(small)
        assert type(small) is type(scratch)
        shapes = {name: tuple(value.shape) for name, value in small.state_dict().items()}
        assert shapes == {name: tuple(value.shape) for name, value in scratch.state_dict().items()}
        scratch.load_state_dict(small.state_dict())
        model.eval()
        with gated.masked(mask):
            torch.testing.assert_close(model(x), scratch.eval()(x))
        model.train()
        counted = sum(p.numel() for name, p in scratch.named_parameters() if p.ndim > 1)
        assert counted == float(gated.cost("weights")(mask))


def test_wrong_widths_are_refused():
    with pytest.raises(espalier.BadInput, match="13 convolutions"):
        VGG((8, 8))
    with pytest.raises(espalier.BadInput, match="6 n"):
        ResNet(21)
    with pytest.raises(espalier.BadInput, match="three streams"):
        ResNet(20, (16, 32))
    with pytest.raises(espalier.BadInput, match="9 blocks"):
        ResNet(20, inner=(16, 32))
