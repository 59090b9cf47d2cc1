"""round_to in fit, shape, sweep and the command line: widths are multiples, the target is never exceeded."""

import pytest
import torch
from torch import nn

import espalier
from espalier.study.training import Training


def data():
    torch.manual_seed(0)
    x = torch.randn(64, 6)
    return x, (x[:, 0] > 0).long()


def network():
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 2))


def multiples(model, of=8):
    return [layer.out_features % of for layer in model if isinstance(layer, nn.Linear)][:-1]


@pytest.mark.parametrize("target", [0.2, 0.5])
def test_fit(target):
    torch.manual_seed(0)
    result = espalier.fit(network(), data(), epochs=4, target=target, batch_size=16, round_to=8, quiet=True)
    assert multiples(result.model) == [0, 0]
    full = sum(p.numel() for p in network().parameters() if p.ndim > 1)
    kept = sum(p.numel() for p in result.model.parameters() if p.ndim > 1)
    assert kept <= target * full
    assert result.share_after == pytest.approx(kept / full)


def test_a_stopped_run_goes_on_with_its_own_blocks(tmp_path):
    """The module was trained in place, so that its importance is another by now."""
    torch.manual_seed(0)
    model, arguments = network(), {"epochs": 6, "target": 0.5, "batch_size": 16, "round_to": 8, "quiet": True}

    class Ends(espalier.Callback):
        def on_epoch(self, loop, rows):
            if rows[0]["epoch"] == 3:
                raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        espalier.fit(model, data(), checkpoint=tmp_path, callbacks=[Ends()], **arguments)
    result = espalier.fit(model, data(), checkpoint=tmp_path, **arguments)
    torch.manual_seed(0)
    whole = espalier.fit(network(), data(), **arguments)
    assert torch.equal(result.mask, whole.mask)
    for a, b in zip(result.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_shape_and_gates_that_are_there_already():
    torch.manual_seed(0)
    x, _ = data()
    shaping = espalier.shape(network(), x[:4], target=0.5, updates=10, round_to=8)
    assert shaping.gated.blocks.keys() == {"0", "2"}
    gated = espalier.attach(network(), x[:4])
    for use in (
        lambda: espalier.shape(gated, target=0.5, updates=10, round_to=8),
        lambda: espalier.fit(gated, data(), epochs=1, round_to=8, quiet=True),
    ):
        with pytest.raises(espalier.BadInput, match="gates already"):
            use()


def test_sweep():
    results = espalier.sweep(
        network, data(), targets=[0.3, 0.6], seeds=(0, 1), epochs=2, batch_size=16, round_to=8, quiet=True, device="cpu"
    )
    assert len(results) == 4
    for result in results:
        assert multiples(result.model) == [0, 0]
        assert result.share_after <= result.target


def test_the_command_line_reads_it():
    assert Training(model="mlp", round_to="8").round_to == "8"
    with pytest.raises(espalier.BadInput, match="--round-to"):
        Training(model="mlp", round_to="even")
