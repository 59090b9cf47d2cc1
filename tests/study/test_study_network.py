"""The study's network: what it computes, counts and starts from, against torch modules."""

from __future__ import annotations

import pytest
import torch
from study_helpers import study
from torch import nn

from espalier.data import Stream, load
from espalier.study.settings import RunSpec
from espalier.study.study_batches import PaperBatch, Units
from espalier.train.batched import Run
from espalier.train.loop import Stop

WIDTHS = (6, 5, 4, 3, 2)


def layers(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def cut(model: nn.Module, widths: tuple[int, ...], mask: torch.Tensor) -> nn.Sequential:
    """The open part of an MLP as a plain, small network, taken by hand."""
    parts = torch.split(mask, list(widths[1:-1]))
    kept = [torch.arange(widths[0]), *[part.nonzero().flatten() for part in parts], torch.arange(widths[-1])]
    modules: list[nn.Module] = []
    for i, full in enumerate(layers(model)):
        layer = nn.Linear(len(kept[i]), len(kept[i + 1]))
        layer.weight.data = full.weight.detach()[kept[i + 1]][:, kept[i]].clone()
        layer.bias.data = full.bias.detach()[kept[i + 1]].clone()
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def test_a_mask_computes_and_costs_what_the_cut_network_does():
    units = Units(WIDTHS)
    rng = torch.Generator().manual_seed(1)
    for seed in range(5):
        mask = (torch.rand(units.gated.d, generator=rng) < 0.6).float()
        for where in units.groups:
            mask[where.start] = 1.0
        model = units.build(Run(seed, mask=mask))
        small = cut(model, WIDTHS, mask)
        x = torch.randn(7, WIDTHS[0], generator=rng)
        masked = units.gated.call(dict(model.named_parameters()), mask, x)
        torch.testing.assert_close(masked, small(x))
        counted = sum(layer.weight.numel() for layer in layers(small))
        assert float(units.cost("weights")(mask)) == counted
        assert float(units.cost("units")(mask)) == mask.sum()
        assert units.counts(mask.unsqueeze(0))[0]["units"] == [int(mask[where].sum()) for where in units.groups]


def test_the_paper_s_network():
    units = Units((784, 784, 784, 784, 10))
    assert units.gated.d == 2352
    ones, mask = (
        torch.ones(2352),
        units.first((340, 141, 126)),
    )  # PAPER: 340 + 141 + 126 units hold 18.0% of the weights
    weights = units.cost("weights")
    assert float(weights(ones)) == 3 * 784**2 + 7840
    assert float(weights(mask) / weights(ones)) == pytest.approx(0.180, abs=5e-4)
    assert float(units.cost("units")(mask) / 2352) == pytest.approx(0.258, abs=5e-4)


def test_initialisation_is_he_s_by_the_units_that_are_read():
    units = Units((300, 200, 200, 200, 10))
    full, small = (layers(units.build(Run(3, mask=units.uniform(share)))) for share in (1.0, 0.25))
    for layer, fans in enumerate(((300, 300), (200, 50), (200, 50))):
        for model, fan in zip((full, small), fans):
            assert float(model[layer].weight.detach().std()) == pytest.approx((2 / fan) ** 0.5, rel=0.02)
            assert not model[layer].bias.any()
    # Equal seeds start from equal draws, other seeds from others.
    torch.testing.assert_close(full[1].weight * 2, small[1].weight)
    assert not torch.equal(layers(units.build(Run(4)))[0].weight, full[0].weight)


def test_a_layer_without_units_closes_everything():
    units = Units(WIDTHS)
    masks = torch.ones(2, units.gated.d)
    masks[0, units.groups[1]] = 0.0
    canonical = units.gated.canonical(masks)
    assert not canonical[0].any()
    assert canonical[1].all()


def test_a_fixed_run_equals_a_small_network_trained_from_scratch(tmp_path):
    made = study(tmp_path, hidden=(10, 8, 6))
    specs = [RunSpec("fixed", "fixed", seed, size=0.5) for seed in (0, 1)]
    engine = PaperBatch(made.settings, made.network, made.given, specs, torch.device("cpu")).engine
    smalls = [cut(made.network.build(run), made.network.widths, run.mask) for run in engine.runs]
    data = load("digits").flatten().as_floats()
    updates = engine.total
    for small, spec in zip(smalls, specs):
        optimizer = torch.optim.SGD(small.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
        order = Stream([spec.seed], len(data.train_labels)).take(updates, 64)[:, 0]
        for update in range(updates):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (0.1 if update >= updates / 2 else 1) * (0.1 if update >= updates * 3 / 4 else 1)
            x, y = data.train_inputs[order[update]].float(), data.train_labels[order[update]]
            optimizer.zero_grad()
            nn.functional.cross_entropy(small(x), y).backward()
            optimizer.step()
    engine.advance(updates, Stop())
    for i, small in enumerate(smalls):
        params = {name: p[i] for name, p in engine.weights().items()}
        x = data.test_inputs[:50].float()
        masked = made.network.gated.call(params, engine.masks()[i], x)
        torch.testing.assert_close(masked, small(x), rtol=1e-3, atol=1e-3)
