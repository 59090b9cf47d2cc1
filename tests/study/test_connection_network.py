"""The study's DenseNet: masks, statistics, costs, initialisation and evaluation, against plain modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from connection_helpers import images, study
from torch import Tensor, nn
from torch.func import grad

import espalier
from espalier.models import DenseNet
from espalier.space import BadInput
from espalier.study import study_batches
from espalier.study.settings import RunSpec
from espalier.study.study_batches import Connections, DenseNetGraph, PaperBatch
from espalier.train import feed
from espalier.train.batched import Run
from espalier.train.batched.batch_engine import made, strip
from espalier.train.batched.step import Differential, cross_entropy
from oracle.gradients import Together

DEPTH, GROWTH, SIDE = 10, 4, 8


@pytest.fixture(scope="module")
def network():
    return Connections(DEPTH, GROWTH, (3, SIDE, SIDE), 10)


@pytest.fixture(scope="module")
def paper():
    return Connections(40, 12, (3, 32, 32), 10)


def readers(graph: DenseNetGraph, block: int) -> list[slice]:
    """Where the connections are that each layer of a block reads, and last what closes it: by counting."""
    inside = graph.layers * (graph.layers + 1) // 2
    starts = [block * inside + layer * (layer + 1) // 2 for layer in range(graph.layers)]
    closing = 3 * inside + block * (graph.layers + 1)
    layers = [slice(start, start + layer + 1) for layer, start in enumerate(starts)]
    return [*layers, slice(closing, closing + graph.layers + 1)]


def random_masks(count: int, d: int, share: float = 0.6, seed: int = 0) -> Tensor:
    return (torch.rand(count, d, generator=torch.Generator().manual_seed(seed)) < share).float()


def counted(model: nn.Module) -> dict[str, int]:
    """Weights and MACs of convolutions and linear layers, from what a forward pass makes."""
    found = {"weights": 0, "macs": 0}

    def count(layer: nn.Module, args: Any, out: Tensor) -> None:
        found["macs"] += layer.weight.numel() * (out[0].numel() // out.shape[1])

    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            found["weights"] += layer.weight.numel()
            layer.register_forward_hook(count)
    model.eval()(torch.zeros(1, 3, SIDE, SIDE))
    return found


def test_costs_are_what_is_counted_on_the_compact_network(network):
    stem = {"weights": 16 * 27, "macs": 16 * 27 * SIDE * SIDE}
    seen = 0
    for mask in network.gated.canonical(random_masks(12, network.gated.d)):
        if not mask.any():
            continue
        seen += 1
        truth = counted(network.gated.compact(mask))
        for kind, constant in stem.items():
            assert float(network.cost(kind)(mask)) + constant == truth[kind]
    assert seen >= 5


def test_prices_by_hand(paper):
    """Layer 2 of block 2 of the paper's network: 3 x 3 convolutions to 12 channels, on 16 x 16 positions."""
    weights, macs = paper.prices("weights"), paper.prices("macs")
    assert float(weights.sum()) == 1_001_184
    second = readers(paper.graph, 1)[1]
    assert weights[second].tolist() == [160 * 12 * 9, 12 * 12 * 9]
    assert macs[second].tolist() == [160 * 12 * 9 * 256, 12 * 12 * 9 * 256]
    closing = [readers(paper.graph, b)[12] for b in range(3)]
    assert weights[closing[0]].tolist() == [16 * 160, *[12 * 160] * 12]
    assert macs[closing[0]].tolist() == [16 * 160 * 1024, *[12 * 160 * 1024] * 12]  # before it is pooled
    assert macs[closing[2]].tolist() == weights[closing[2]].tolist() == [3040, *[120] * 12]
    assert [len(where) for where in paper.graph.blocks] == [91] * 3
    assert torch.cat(paper.graph.blocks).sort().values.tolist() == list(range(273))


def test_paths_are_those_of_the_gated_model(network):
    graph = network.graph
    for mask in random_masks(60, graph.d, share=0.45, seed=3):
        canonical = network.gated.canonical(mask.unsqueeze(0))[0]
        assert bool(graph.paths(mask)["depth"]) == bool(canonical.any())
        if not canonical.any():
            assert graph.paths(canonical)["depth"] == 0
            continue
        assert graph.paths(mask) == graph.paths(canonical)  # dead parts are on no path
        small = network.gated.compact(mask)
        convolutions = [m for m in small.modules() if isinstance(m, (nn.Conv2d, nn.Linear)) and m.weight.numel()]
        assert len(convolutions) == DEPTH - len(graph.paths(canonical)["dead_layers"])


def test_the_depth_of_a_found_network():
    graph = DenseNetGraph(12)
    assert graph.paths(torch.ones(273))["depth"] == 40
    mask = torch.zeros(273)
    for block in range(3):  # only the block's input is read by what closes it
        mask[readers(graph, block)[12].start] = 1
    dead = [*range(2, 14), *range(15, 27), *range(28, 40)]
    assert graph.paths(mask) == {"depth": 4, "block_depths": [0, 0, 0], "dead_layers": dead}
    mask[readers(graph, 1)[4].start] = mask[readers(graph, 1)[12].start + 5] = 1  # and one layer of block 2
    dead = [*range(2, 14), *range(15, 19), *range(20, 27), *range(28, 40)]
    assert graph.paths(mask) == {"depth": 5, "block_depths": [0, 1, 0], "dead_layers": dead}


def plain_gradients(network: Connections, params: dict[str, Tensor], mask: Tensor, x: Tensor, y: Tensor) -> Any:
    """One run under one mask by a module of its own in train mode: its statistics are this mini-batch's."""
    model = DenseNet(DEPTH, GROWTH).double().train()
    gated = espalier.attach(model, torch.zeros(1, 3, SIDE, SIDE, dtype=torch.float64), check=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(params[name])
    with gated.masked(mask):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def stacked(network: Connections, runs: list[Run]) -> dict[str, Tensor]:
    """The initial weights of the runs ``(R, ...)``."""
    built = [dict(made(network.build, run).named_parameters()) for run in runs]
    return {name: torch.stack([one[name].detach() for one in built]) for name in built[0]}


def caller(network: Connections) -> Any:
    """One run under one mask, with the statistics of the mini-batch."""
    gated = espalier.attach(DenseNet(**network.sizes), torch.zeros(1, *network.shape), check=False)
    strip(gated.model)
    return gated.call


@pytest.mark.parametrize("way", ["mapped", "own"])
def test_every_mask_of_every_run_has_statistics_of_its_own(network, way):
    rng = torch.Generator().manual_seed(1)
    masks = random_masks(4, network.gated.d, 0.8).reshape(2, 2, -1).double()
    params = {name: p.double() for name, p in stacked(network, [Run(0), Run(1)]).items()}
    x = torch.randn(2, 5, 3, SIDE, SIDE, generator=rng, dtype=torch.float64)
    y = torch.randint(0, 10, (2, 5), generator=rng)
    call = caller(network)

    def together(params: dict[str, Tensor], masks: Tensor, x: Tensor) -> Tensor:
        runs = range(len(masks))
        return torch.stack(
            [torch.stack([call({n: p[r] for n, p in params.items()}, m, x[r]) for m in masks[r]]) for r in runs]
        )

    gradient = Differential(call, cross_entropy) if way == "mapped" else Together(together)
    with torch.no_grad():
        grads, (losses, wrong), _ = gradient(params, {}, masks, x, y, each=False)
    assert wrong.shape == losses.shape == (2, 2)
    for r in range(2):
        alone = [
            plain_gradients(network, {n: p[r] for n, p in params.items()}, masks[r, s], x[r], y[r]) for s in range(2)
        ]
        torch.testing.assert_close(losses[r], torch.stack([loss for loss, _ in alone]), rtol=1e-10, atol=1e-12)
        for name in params:
            mean = (alone[0][1][name] + alone[1][1][name]) / 2
            torch.testing.assert_close(grads[name][r], mean, rtol=1e-8, atol=1e-11)


def test_initialisation_is_he_s_by_the_channels_that_are_read():
    network = Connections(DEPTH, 32, (3, SIDE, SIDE), 10)
    masks = torch.ones(2, network.gated.d)
    where = network.gated.space.slices["blocks.2.1.gate"]
    masks[1, where.start] = 0  # the last block's input, 144 of 176 channels
    params = stacked(network, [Run(3, mask=mask) for mask in masks])
    weight = params["blocks.2.1.conv.weight"]
    for run, width in ((0, 176), (1, 32)):
        assert float(weight[run].std()) == pytest.approx((2 / (9 * width)) ** 0.5, rel=0.02)
    torch.testing.assert_close(weight[1], weight[0] * (176 / 32) ** 0.5)
    assert torch.equal(params["stem.weight"][0], params["stem.weight"][1])
    other = stacked(network, [Run(4)])
    assert not torch.equal(other["stem.weight"][0], params["stem.weight"][0])


def batch_of(tmp_path, specs, **changes):
    made = study(tmp_path, **changes)
    batch = PaperBatch(made.settings, made.network, made.given, specs, torch.device("cpu"), made.compute)
    batch.engine.batch.advance(4)
    return batch


def test_statistics_are_the_mean_over_one_pass_and_errors_are_the_compact_network_s(tmp_path, monkeypatch):
    monkeypatch.setattr(feed, "CHUNK", 16)
    engine = batch_of(tmp_path, [RunSpec("random", "random", 0, size=0.6), RunSpec("full", "full", 1, size=1.0)]).engine
    masks = engine.masks()
    losses, errors, _ = engine.evaluate(masks, engine.validation, True)
    data = images().as_floats()
    chunks = data.train_inputs.split(16)
    for run, state in enumerate(engine.shipped):
        model = DenseNet(DEPTH, GROWTH)
        model.load_state_dict(state)
        # The first norm reads the stem, whatever the mask: its statistics are known without a network.
        stem = [nn.functional.conv2d(x, state["stem.weight"], padding=1) for x in chunks]
        means = torch.stack([x.mean((0, 2, 3)) for x in stem]).mean(0)
        variances = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in stem]).mean(0)
        torch.testing.assert_close(state["blocks.0.0.norm.running_mean"], means)
        torch.testing.assert_close(state["blocks.0.0.norm.running_var"], variances)
        small = espalier.attach(model, data.train_inputs[:1], check=False).compact(masks[run]).eval()
        with torch.no_grad():
            out = small(data.test_inputs)
        assert float((out.argmax(-1) != data.test_labels).float().mean()) == pytest.approx(float(errors[run]))
        loss = nn.functional.cross_entropy(out, data.test_labels)
        assert float(loss) == pytest.approx(float(losses[run]), rel=1e-5)
    object.__setattr__(engine.plan, "calibrate", 32)
    middle, _, _ = engine.evaluate(masks, engine.validation, False)
    assert not engine.shipped
    assert not torch.equal(middle, losses)  # of 32 of the 48 images


def test_random_selections_are_near_their_share_and_lead_somewhere(paper, monkeypatch):
    prices = paper.prices("weights")
    seen = {}
    for share in (0.16, 0.42):
        for seed in range(3):
            mask, told = paper.graph.draw(share, prices, seed)
            again, _ = paper.graph.draw(share, prices, seed)
            assert torch.equal(mask, again)
            usage = float((mask.double() * prices).sum() / prices.sum())
            assert abs(usage - share) <= 0.005
            assert paper.gated.canonical(mask.unsqueeze(0)).any()
            assert told["without_path"] < told["draws"]
            assert told["without_path_share"] == told["without_path"] / told["draws"]
            seen.setdefault(share, []).append(told)
    low, high = (sum(t["without_path"] for t in seen[s]) / sum(t["draws"] for t in seen[s]) for s in (0.16, 0.42))
    assert low > 0.7  # PAPER: 86% and 3%
    assert high < 0.15
    monkeypatch.setattr(study_batches, "MOST_DRAWS", 300)
    with pytest.raises(BadInput, match=r"none of 300 .* another share"):
        DenseNetGraph(1).draw(0.001, torch.ones(9, dtype=torch.float64), 0)


def test_a_given_network_is_trained_without_its_dead_parts(tmp_path):
    batch = batch_of(tmp_path, [RunSpec("random", "random", seed, size=0.6) for seed in range(4)])
    canonical = batch.network.gated.canonical(batch.selected())
    assert not torch.equal(canonical, batch.selected())  # else nothing is tested
    assert torch.equal(batch.engine.batch.source.mask, canonical)


def test_what_no_gate_reads_has_no_gradient(network):
    """A dead layer's weights stay where weight decay leaves them."""
    mask = torch.ones(network.gated.d)
    for reader in readers(network.graph, 0)[1:]:
        mask[reader.start + 1] = 0  # nobody reads the first layer
    params, call = dict(made(network.build, Run(0)).named_parameters()), caller(network)
    x = torch.randn(4, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    grads = grad(lambda p: cross_entropy(call(p, mask, x), torch.arange(4)))(params)
    assert not grads["blocks.0.0.conv.weight"].any()
    assert grads["blocks.0.1.conv.weight"].any()
    assert not grads["blocks.0.1.conv.weight"][:, 16:].any()


def test_vectors_are_refused():
    with pytest.raises(BadInput, match="images"):
        Connections(DEPTH, GROWTH, (64,), 10)
