"""The activation of every layer chosen while a network of the digits trains: a dead one is never kept."""

import networks
import pytest
import torch
from torch import nn

import espalier

TRAIN, TEST = networks.digit_vectors()


class Dead(nn.Module):
    """Gives zeros."""

    def forward(self, x):
        return x * 0.0


def network() -> nn.Sequential:
    def act():
        return espalier.Mixed([Dead(), nn.ReLU(), nn.Tanh()])

    return nn.Sequential(nn.Linear(64, 32), act(), nn.Linear(32, 32), act(), nn.Linear(32, 10))


@pytest.mark.parametrize("target", [None, 0.5])
def test_activations_of_the_digits(target):
    torch.manual_seed(0)
    options = {} if target is None else {"target": target}
    result = espalier.fit(
        network(), TRAIN, epochs=12, validation=TEST, recipe="ranked", batch_size=32, quiet=True, **options
    )
    activations = [layer for layer in result.model if not isinstance(layer, nn.Linear)]
    assert len(activations) == 2
    assert all(isinstance(layer, (nn.ReLU, nn.Tanh)) for layer in activations)
    assert result.validation.error < 0.1  # 0.9 where one of them is dead
    if target is not None:
        assert sum(p.numel() for p in result.model.parameters() if p.ndim > 1) <= target * 3392


def test_a_sweep_chooses_too():
    def two() -> nn.Sequential:
        act = espalier.Mixed([nn.ReLU(), nn.Tanh()])
        return nn.Sequential(nn.Linear(64, 32), act, nn.Linear(32, 10))

    results = espalier.sweep(
        two, TRAIN, targets=[0.5], seeds=(0, 1), epochs=6, validation=TEST, quiet=True, device="cpu"
    )
    for result in results:
        assert isinstance(result.model[1], (nn.ReLU, nn.Tanh))
        assert result.share_after <= 0.5
        assert result.validation.error < 0.2
