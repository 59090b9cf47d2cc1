"""From a residual network with BatchNorm to a smaller one on disk: masked, compact and loaded are one network."""

from __future__ import annotations

from pathlib import Path

import networks
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier import fit
from espalier.data import load
from espalier.models import CNN
from espalier.train import deterministic, evaluate

DATA, TEST = networks.digit_images()


def macs(model: nn.Module, images: torch.Tensor) -> int:
    """Counted while the network runs: every multiplication of a convolution or linear layer, for one image."""
    total = 0

    def count(module: nn.Module, _: object, output: torch.Tensor) -> None:
        nonlocal total
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        total += weight.numel() * (output[0, 0].numel() if output.ndim == 4 else 1)

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    with torch.no_grad():
        model(images[:1])
    for hook in hooks:
        hook.remove()
    return total


def test_a_mac_target_on_a_resnet_end_to_end(tmp_path: Path) -> None:
    model = networks.resnet(8).eval()
    full = macs(model, TEST[0])
    gated = espalier.attach(model, DATA[0][:4])
    result = fit(
        gated,
        DATA,
        loss=F.cross_entropy,
        epochs=8,
        cost="macs",
        target=0.4,
        validation=TEST,
        checkpoint=tmp_path / "run",
        quiet=True,
    )
    assert 0.33 < macs(result.model, TEST[0]) / full <= 0.4
    assert macs(result.model, TEST[0]) / full == pytest.approx(result.shares["cost_share"])
    assert result.validation is not None
    assert result.validation.error is not None
    assert result.validation.error < 0.1

    espalier.save(result.model, tmp_path / "small")
    loaded = espalier.load(tmp_path / "small", networks.resnet).eval()
    x = TEST[0].double()
    with torch.no_grad(), gated.masked(result.mask):
        masked = model.double().eval()(x)
    compact, again = result.model.double()(x), loaded.double()(x)
    torch.testing.assert_close(masked, compact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(compact, again, rtol=0, atol=0)
    assert deterministic(gated, result.mask, (x, TEST[1]), loss=F.cross_entropy).error == result.validation.error

    # The running statistics are those of the mask that ships, over the training data, once.
    first = next(m for m in result.model.modules() if isinstance(m, nn.BatchNorm2d))
    stem = next(m for m in result.model.modules() if isinstance(m, nn.Conv2d))
    with torch.no_grad():
        means = stem(DATA[0].double()).mean((0, 2, 3))
    torch.testing.assert_close(first.running_mean, means, rtol=1e-4, atol=1e-5)


def test_a_trained_resnet_is_fine_tuned() -> None:
    """A network is trained, then fine-tuned to half its MACs in a third of the epochs: about as good, at half."""
    model = networks.resnet(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    for update in range(200):
        optimizer.param_groups[0]["lr"] = 0.05 if update < 150 else 0.005
        index = torch.randint(len(DATA[0]), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(DATA[0][index]), DATA[1][index]).backward()
        optimizer.step()
    before = evaluate(model, TEST, loss=F.cross_entropy).error
    result = fit(
        model,
        DATA,
        loss=F.cross_entropy,
        epochs=4,
        cost="macs",
        target=0.5,
        recipe="finetune",
        validation=TEST,
        quiet=True,
    )
    assert before is not None
    assert result.validation is not None
    assert result.validation.error is not None
    assert result.history[0]["loss"] < 0.3  # the first masks lose little of what the network knows
    assert result.validation.error <= before + 0.02
    assert result.share_after <= 0.5


@pytest.mark.parametrize("cost", ["weights", "macs"])
def test_a_trained_network_is_shaped_without_collapsing_a_layer(cost: str) -> None:
    """At a tenth of a convolutional network no layer may become a bottleneck of a few channels."""
    data = load("digits").as_floats()
    torch.manual_seed(0)
    model = CNN(1, (16, 32, 32, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(4):
        for part in torch.arange(len(data.train[0])).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(data.train[0][part]), data.train[1][part]).backward()
            optimizer.step()
    result = fit(
        model, data.train, loss=F.cross_entropy, epochs=4, cost=cost, target=0.1, recipe="finetune", quiet=True
    )
    widths = [block[0].out_channels for block in result.model.blocks]
    assert min(widths) >= 4, widths
    assert evaluate(result.model, data.test, loss=F.cross_entropy).error < 0.06
