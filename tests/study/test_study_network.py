"""The study's network: what it computes, counts and starts from, against torch modules."""

from __future__ import annotations

import pytest
import torch
from study_helpers import study
from torch import nn

import espalier
from espalier.data import Stream, load
from espalier.models import MLP
from espalier.study.batch import StudyBatch
from espalier.study.network import Network
from espalier.study.settings import RunSpec

WIDTHS = (6, 5, 4, 3, 2)


def cut(network: Network, params: dict[str, torch.Tensor], mask: torch.Tensor) -> nn.Sequential:
    """The open part of one run as a plain, small network."""
    kept = [torch.arange(network.widths[0]), *[mask[where].nonzero().flatten() for where in network.layers]]
    kept.append(torch.arange(network.widths[-1]))
    modules: list[nn.Module] = []
    for i in range(len(network.widths) - 1):
        layer = nn.Linear(len(kept[i]), len(kept[i + 1]))
        layer.weight.data = params[f"{i}.weight"][kept[i + 1]][:, kept[i]].clone()
        layer.bias.data = params[f"{i}.bias"][kept[i + 1]].clone()
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def test_a_mask_computes_and_costs_what_the_cut_network_does():
    network = Network(WIDTHS)
    rng = torch.Generator().manual_seed(1)
    for seed in range(5):
        mask = (torch.rand(network.space.d, generator=rng) < 0.6).float()
        for where in network.layers:
            mask[where.start] = 1.0
        stacked = network.start([seed], mask.unsqueeze(0), torch.device("cpu"))
        params = {name: p[0] for name, p in stacked.items()}
        small = cut(network, params, mask)
        x = torch.randn(7, WIDTHS[0], generator=rng)
        torch.testing.assert_close(network.call(params, mask, x), small(x))
        counted = sum(layer.weight.numel() for layer in small if isinstance(layer, nn.Linear))
        assert float(network.weight_cost(mask)) == counted
        assert float(network.unit_cost(mask)) == mask.sum()
        assert network.units(mask.unsqueeze(0))[0].tolist() == [int(mask[w].sum()) for w in network.layers]


def test_the_paper_s_network():
    network = Network((784, 784, 784, 784, 10))
    assert network.space.d == 2352
    ones = torch.ones(2352)
    assert float(network.weight_cost(ones)) == 3 * 784**2 + 7840
    mask = torch.zeros(2352)  # PAPER: 340 + 141 + 126 units hold 18.0% of the weights
    for where, count in zip(network.layers, (340, 141, 126)):
        mask[where.start : where.start + count] = 1.0
    assert float(network.weight_cost(mask) / network.weight_cost(ones)) == pytest.approx(0.180, abs=5e-4)
    assert float(network.unit_cost(mask) / 2352) == pytest.approx(0.258, abs=5e-4)


def test_initialisation_is_he_s_by_the_units_that_are_read():
    network = Network((300, 200, 200, 200, 10))
    masks = torch.stack([network.uniform(1.0), network.uniform(0.25)])
    params = network.start([3, 3], masks, torch.device("cpu"))
    fans = {0: (300, 300), 1: (200, 50), 2: (200, 50)}
    for layer, pair in fans.items():
        for run, fan in enumerate(pair):
            assert float(params[f"{layer}.weight"][run].std()) == pytest.approx((2 / fan) ** 0.5, rel=0.02)
        assert not params[f"{layer}.bias"].any()
    # Equal seeds start from equal draws, other seeds from others.
    torch.testing.assert_close(params["1.weight"][0] * 2, params["1.weight"][1])
    other = network.start([4], masks[:1], torch.device("cpu"))
    assert not torch.equal(other["0.weight"][0], params["0.weight"][0])


def test_a_layer_without_units_closes_everything():
    network = Network(WIDTHS)
    masks = torch.ones(2, network.space.d)
    masks[0, network.layers[1]] = 0.0
    canonical = network.canonical(masks)
    assert not canonical[0].any()
    assert canonical[1].all()


def test_a_fixed_run_equals_a_small_network_trained_from_scratch(tmp_path):
    made = study(tmp_path, hidden=(10, 8, 6))
    runs = [RunSpec("fixed", "fixed", seed, size=0.5) for seed in (0, 1)]
    batch = StudyBatch(made.settings, made.network, made.data, runs, torch.device("cpu"), None)
    smalls = []
    for i in range(2):
        mask = batch.masks()[i]
        smalls.append(cut(made.network, {name: p[i] for name, p in batch.batch.state.params.items()}, mask))
    data = load("digits").flatten().as_floats()
    updates = batch.total
    for small, run in zip(smalls, runs):
        optimizer = torch.optim.SGD(small.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
        order = Stream([run.seed], len(data.train_labels)).take(updates, 64)[:, 0]
        for update in range(updates):
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (0.1 if update >= updates / 2 else 1) * (0.1 if update >= updates * 3 / 4 else 1)
            x, y = data.train_inputs[order[update]].float(), data.train_labels[order[update]]
            optimizer.zero_grad()
            nn.functional.cross_entropy(small(x), y).backward()
            optimizer.step()
    batch.batch.advance(updates)
    for i, small in enumerate(smalls):
        mask = batch.masks()[i]
        params = {name: p[i] for name, p in batch.batch.state.params.items()}
        x = data.test_inputs[:50].float()
        torch.testing.assert_close(made.network.call(params, mask, x), small(x), rtol=1e-3, atol=1e-3)


def test_it_computes_and_costs_what_the_attached_model_does():
    torch.manual_seed(0)
    model = MLP(WIDTHS[0], WIDTHS[1:-1], WIDTHS[-1]).double()
    gated = espalier.attach(model, torch.rand(3, WIDTHS[0], dtype=torch.float64))
    network = Network(WIDTHS)
    names = [f"layers.{i}" for i in range(3)] + ["head"]
    tensors = dict(model.named_parameters())
    params = {f"{i}.{part}": tensors[f"{name}.{part}"] for i, name in enumerate(names) for part in ("weight", "bias")}
    assert gated.d == network.space.d
    rng = torch.Generator().manual_seed(2)
    for _ in range(10):
        mask = (torch.rand(network.space.d, generator=rng) < 0.5).float()
        for where in network.layers:  # an attached layer keeps one unit, the paper's need not
            mask[where.stop - 1] = 1.0
        canonical = network.canonical(mask.unsqueeze(0))[0]
        assert torch.equal(canonical, gated.canonical(mask).float())
        x = torch.rand(4, WIDTHS[0], generator=rng, dtype=torch.float64)
        torch.testing.assert_close(network.call(params, canonical.double(), x), gated.call(tensors, canonical, x))
        for kind in ("units", "weights"):
            assert float(network.cost(kind)(canonical)) == float(gated.cost(kind)(canonical))
