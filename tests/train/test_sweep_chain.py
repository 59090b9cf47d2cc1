"""A chain's gradient by hand against the derived one, factors against products, and which models are chains."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import espalier
from espalier.train.batched import SGD, Steps
from espalier.train.batched.batch import Batch
from espalier.train.batched.chain import Chain, Factors, chain_of
from espalier.train.batched.inputs import Given
from espalier.train.batched.step import Differential, cross_entropy
from espalier.train.batched.sweep import sweep

R, S, B = 3, 2, 5
WIDTHS = (7, 6, 4, 3)
GATES = (slice(0, 6), slice(6, 10))
CHAIN = Chain(tuple((f"{i}.weight", f"{i}.bias") for i in range(3)), GATES)


def case(seed: int, each: bool) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    params = {}
    for i, (inputs, outputs) in enumerate(pairwise(WIDTHS)):
        params[f"{i}.weight"] = torch.randn(R, outputs, inputs, dtype=torch.float64, generator=rng)
        params[f"{i}.bias"] = torch.randn(R, outputs, dtype=torch.float64, generator=rng)
    masks = (torch.rand(R, B if each else S, 10, generator=rng) < 0.6).double() * (2.0 if each else 1.0)
    x = torch.randn(R, B, WIDTHS[0], dtype=torch.float64, generator=rng)
    return params, masks, x, torch.randint(0, WIDTHS[-1], (R, B), generator=rng)


def multiplied(factors: list[Factors]) -> dict[str, Tensor]:
    return {name: g for one in factors for name, g in one.gradients().items()}


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_by_hand_is_the_derived_one(seed: int, each: bool) -> None:
    params, masks, x, y = case(seed, each)
    grads, (losses, wrong), _ = Differential(CHAIN.outputs, cross_entropy)(params, {}, masks, x, y, each=each)
    factors, (by_hand, wrong_by_hand), _ = CHAIN(params, masks, x, y, each=each)
    found = multiplied(factors)
    assert found.keys() == grads.keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(by_hand, losses, rtol=1e-12, atol=0)
    assert torch.equal(wrong_by_hand, wrong)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("each", [False, True])
def test_a_kernel_is_given_plain_memory(each: bool, samples: int) -> None:
    params, masks, x, y = case(0, each)
    factors, _, _ = CHAIN(params, masks if each else masks[:, :samples], x, y, each=each)
    for one in factors:
        for tensor in one.contiguous():
            assert tensor.is_contiguous()


def known(model: nn.Module, inputs: int = 7) -> Chain | None:
    x = torch.randn(4, inputs)
    gated = espalier.attach(model, x)
    params = {name: p.detach() for name, p in model.named_parameters()}
    return chain_of(model, [where for _, where in gated.space.bits], gated.call, params, x)


class Doubled(nn.Module):
    """The layers of a chain, but not its computation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(2 * x)


def test_which_models_are_chains() -> None:
    chain = known(nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)))
    assert chain is not None
    assert chain.layers[1] == ("2.weight", "2.bias")
    assert chain.gates == GATES
    assert known(Doubled()) is None
    assert known(nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))) is None
    assert known(nn.Sequential(nn.Linear(7, 6, bias=False), nn.ReLU(), nn.Linear(6, 3))) is None
    assert known(nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3))) is None


def test_a_sweep_by_hand_is_a_sweep_by_derivation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the same body as on a GPU: without a look at the losses."""
    from espalier.train.batched import batch_engine
    from espalier.train.batched.step import Step

    monkeypatch.setattr(Step, "exactly", Step.__call__)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(64, 7, generator=rng)
    data = x, (x[:, 0] > 0).long()

    def factory() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 2)).double()

    def trained() -> list[Tensor]:
        results = sweep(factory, data, targets=[0.5, 0.8], seeds=[0, 1], epochs=3, batch_size=8, quiet=True)
        return [torch.cat([p.flatten() for p in result.model.parameters()]) for result in results]

    by_hand = trained()
    monkeypatch.setattr(batch_engine, "chain_of", lambda *_: None)
    for one, other in zip(by_hand, trained(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_targets_that_are_left_out_are_left_to_the_loss_that_knows_them() -> None:
    """torch's cross entropy ignores -100; a chain's own does not, so such data are not its."""
    params, masks, x, y = case(0, False)
    given = {"call": CHAIN.outputs, "params": params, "fixed": {}, "seeds": [0, 1, 2], "schedule": Steps(), "total": 4}
    given |= {"source": Given(masks[:, 0], torch.zeros(R)), "optimizer": SGD(), "batch_size": 2, "samples": 2}
    left_out, beyond = y[0].clone(), y[0].clone()
    left_out[0], beyond[-1] = -100, WIDTHS[-1]
    for targets, known in ((y[0], True), (left_out, False), (beyond, False)):
        batch = Batch(**given, data=(x[0], targets), loss=nn.functional.cross_entropy, chain=CHAIN)
        assert (batch.step.chain is not None) == known


def test_classes_that_the_network_does_not_have_are_refused() -> None:
    x, known = torch.randn(20, 7), torch.arange(20) % 3
    for targets in (torch.arange(20) % 4, torch.arange(20) % 3 - 1):
        for train, held in ((targets, known), (known, targets)):
            with pytest.raises(espalier.BadInput, match="the network tells 3 apart"):
                sweep(
                    lambda: nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)),
                    (x, train),
                    validation=(x, held),
                    epochs=1,
                    batch_size=5,
                )


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (1, torch.randn(20, 1)),
        (3, nn.functional.one_hot(torch.arange(20) % 3).float()),
        (1, torch.zeros(20, dtype=torch.int64)),
        (3, torch.zeros(20)),
        (3, torch.zeros(20, 1, dtype=torch.int64)),
    ],
)
def test_targets_that_are_no_classes_are_refused(outputs: int, targets: torch.Tensor) -> None:
    """A number that is no class would be compared with each, and the loss would be 0."""
    with pytest.raises(espalier.BadInput, match="give loss="):
        sweep(
            lambda: nn.Sequential(nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, outputs)), (torch.randn(20, 7), targets),
            epochs=1, batch_size=5,
        )  # fmt: skip
