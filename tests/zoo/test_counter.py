"""The counter against layers counted by hand: it judges the library, so nothing else may judge it."""

import pytest
import torch
from torch import nn

from .counter import by_layers, by_operations
from .sequences import GPT


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# Layer, input shape, weights, MACs and parameters worked out on paper.
BY_HAND = [
    pytest.param(nn.Linear(5, 7), (3, 5), 35, 3 * 35, 42, id="linear"),
    pytest.param(nn.Linear(5, 7, bias=False), (2, 4, 5), 35, 8 * 35, 35, id="linear on a sequence"),
    pytest.param(nn.Conv2d(3, 8, 3, padding=1), (2, 3, 6, 5), 216, 2 * 30 * 216, 224, id="conv"),
    pytest.param(nn.Conv2d(3, 8, 3, stride=2), (1, 3, 7, 7), 216, 9 * 216, 224, id="strided conv, no padding"),
    pytest.param(nn.Conv2d(6, 6, 3, padding=1, groups=6), (1, 6, 4, 4), 54, 16 * 54, 60, id="depthwise"),
    pytest.param(nn.Conv2d(6, 4, 1, groups=2), (1, 6, 4, 4), 12, 16 * 12, 16, id="grouped"),
    pytest.param(nn.Conv1d(2, 4, 5), (3, 2, 9), 40, 3 * 5 * 40, 44, id="conv1d"),
    pytest.param(nn.Conv3d(1, 2, 2), (1, 1, 3, 3, 3), 16, 8 * 16, 18, id="conv3d"),
    pytest.param(nn.ConvTranspose2d(4, 3, 2, 2), (1, 4, 5, 5), 48, 25 * 48, 51, id="transposed"),
    pytest.param(nn.LSTM(4, 6, batch_first=True), (2, 5, 4), 240, 2 * 5 * 240, 288, id="lstm"),
    pytest.param(nn.GRU(4, 6, 2, batch_first=True), (2, 5, 4), 180 + 216, 2 * 5 * 396, 468, id="gru of two layers"),
    pytest.param(nn.BatchNorm2d(4), (2, 4, 3, 3), 0, 0, 8, id="norm"),
]


@pytest.mark.parametrize(("layer", "shape", "weights", "macs", "parameters"), BY_HAND)
def test_layers_counted_by_hand(layer, shape, weights, macs, parameters):
    seen = by_operations(layer.double(), double(*shape))
    assert (seen.weights, seen.macs, seen.parameters, seen.attention) == (weights, macs, parameters, 0)
    assert by_layers(layer).weights == weights
    assert by_layers(layer).parameters == parameters


def test_tied_weight_counts_once_and_attention_is_apart():
    model = GPT(vocabulary=50, width=32, heads=4, layers=2).double()
    per_block = 12 * 32 * 32
    seen = by_operations(model, torch.zeros(3, 7, dtype=torch.long))
    assert seen.weights == by_layers(model).weights == 2 * per_block + 50 * 32
    assert seen.macs == 3 * 7 * (2 * per_block + 50 * 32)
    assert seen.attention == 2 * (2 * 3 * 7 * 7 * 32)  # two blocks; scores and mixing, every query with every key


def test_raw_parameter_and_einsum_are_seen():
    class Raw(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(double(4, 2, 3))

        def forward(self, x):  # x: (batch, 3)
            return torch.einsum("hdi,bi->bhd", self.weight, x)

    seen = by_operations(Raw(), double(5, 3))
    assert (seen.weights, seen.macs) == (24, 5 * 24)


def test_a_vector_counts_as_a_matrix_of_one_column():
    class Vector(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.matrix = nn.Parameter(double(4)), nn.Parameter(double(3, 5))

        def forward(self, x):  # x: (batch, 4)
            return torch.addmv(x @ self.weight, x @ double(4, 5), self.matrix[0]) + (self.matrix @ x[0, 0].expand(5))[0]

    seen = by_operations(Vector(), double(7, 4))
    assert (seen.weights, seen.macs, seen.attention) == (4 + 15, 7 * 4 + 7 * 5 + 15, 7 * 4 * 5)


@pytest.mark.parametrize(
    ("norm", "more"), [(nn.utils.parametrizations.weight_norm, 7), (nn.utils.parametrizations.spectral_norm, 0)]
)
def test_a_normalised_weight_counts_as_the_weight_it_makes(norm, more):
    layer = norm(nn.Linear(5, 7)).double().eval()
    seen = by_operations(layer, double(3, 5))
    assert (seen.weights, seen.macs, seen.parameters) == (35, 3 * 35, 35 + 7 + more)
    assert by_layers(layer).weights == 35


def test_multihead_attention_in_eval_mode_takes_no_hidden_path():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    x = double(2, 5, 8)
    seen = by_operations(layer, (x, x, x))
    assert seen.weights == by_layers(layer).weights == 4 * 64
    assert seen.macs == 2 * 5 * 4 * 64


def test_counting_in_train_mode_leaves_running_statistics():
    layer = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)).double()
    by_operations(layer, double(2, 2, 4, 4))
    assert layer[1].running_mean.eq(0).all()
    assert layer[1].num_batches_tracked == 0


def test_two_roads_agree_on_the_uncut_zoo(it):
    model = it.entry.build().eval()
    assert by_operations(model, it.inputs).weights == by_layers(model).weights
