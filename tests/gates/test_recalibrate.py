"""Recalibration: BatchNorm's statistics as a cumulative mean over one pass."""

import pytest
import torch
from torch import nn

import espalier


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2)).double()
    return model, torch.randn(60, 5, dtype=torch.float64)


def test_statistics_are_the_mean_of_the_batches():
    model, x = model_and_data()
    model.train()
    model[3].eval()
    espalier.recalibrate(model, x, batch_size=20)
    hidden = [model[0](part) for part in x.split(20)]
    norm = model[1]
    assert torch.allclose(norm.running_mean, torch.stack([h.mean(0) for h in hidden]).mean(0))
    assert torch.allclose(norm.running_var, torch.stack([h.var(0) for h in hidden]).mean(0))
    assert norm.momentum == 0.1
    assert [m.training for m in model] == [True, True, True, False, True]


def test_every_form_of_data_gives_the_same():
    results = []
    for form in (
        lambda x: x,
        lambda x: (x, torch.zeros(60)),
        lambda x: list(x.split(20)),
        lambda x: [(part, torch.zeros(20)) for part in x.split(20)],
        lambda x: ({"input": part} for part in x.split(20)),
    ):
        model, x = model_and_data()
        espalier.recalibrate(model, form(x), batch_size=20)
        results.append(model[1].running_var.clone())
    assert all(torch.equal(r, results[0]) for r in results)


def test_under_a_mask_the_statistics_are_those_of_the_compact_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    model.double()
    x = torch.randn(60, 5, dtype=torch.float64)
    gated = espalier.attach(model, x)
    mask = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0, 1, 1])
    small = gated.compact(mask)
    with gated.masked(mask):
        espalier.recalibrate(model, x)
    espalier.recalibrate(small, x)
    assert torch.allclose(model[3].running_mean[[0, 2, 3]], small[3].running_mean)


def test_bad_data_is_named_and_no_norms_need_none():
    model, _ = model_and_data()
    with pytest.raises(espalier.BadInput, match="no batch"):
        espalier.recalibrate(model, [])
    with pytest.raises(espalier.BadInput, match="int"):
        espalier.recalibrate(model, [3])
    with pytest.raises(espalier.BadInput, match="int"):
        espalier.recalibrate(model, 3)
    espalier.recalibrate(nn.Linear(2, 2), [])


def test_no_examples_and_sizes_that_are_none_are_refused_and_change_nothing():
    model, x = model_and_data()
    espalier.recalibrate(model, x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for data, match in (
        (x[:0], "batch 0 has no examples"),
        ((x[:0], torch.zeros(0)), "batch 0 has no examples"),
        ([x, x[:0]], "batch 1 has no examples"),
        ([{"input": x}, {"input": x[:0]}], "batch 1 has no examples"),
        ([], "no batch"),
        ([x, 3], "int"),
    ):
        with pytest.raises(espalier.BadInput, match=match):
            espalier.recalibrate(model, data)
    with pytest.raises(RuntimeError):
        espalier.recalibrate(model, [x, x[:, :2]])
    for size in (0, -1, 2.5, True, None):
        with pytest.raises(espalier.BadInput, match=r"batch_size is (an integer|at least 1), not"):
            espalier.recalibrate(model, x, batch_size=size)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model[1].momentum, model.training) == (0.1, True)


@pytest.mark.parametrize("sizes", [(20, 20, 20), (40, 20), (50, 8, 2), (59, 1)])
def test_a_batch_counts_by_what_it_holds(sizes):
    """A last batch of two is two of sixty, not half of the statistics; one of a single row is no reason to fail."""
    model, x = model_and_data()
    parts = x.split(sizes)
    espalier.recalibrate(model, list(parts))
    hidden = [(len(part), model[0](part)) for part in parts if len(part) > 1]
    counted = sum(count for count, _ in hidden)
    assert torch.allclose(model[1].running_mean, sum(n * h.mean(0) for n, h in hidden) / counted)
    assert torch.allclose(model[1].running_var, sum(n * h.var(0) for n, h in hidden) / counted)
    assert all(module.training for module in model)
    assert not model[1]._forward_pre_hooks


def test_a_norm_that_is_called_twice_counts_both_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def forward(self, a, b):
            return self.norm(a) + self.norm(input=b)

    torch.manual_seed(0)
    model, a, b = Twice(), torch.randn(16, 3).double(), 5 + torch.randn(16, 3).double()
    espalier.recalibrate(model, [((a[:12], b[:12]), None), ((a[12:], b[12:]), None)])
    assert torch.allclose(model.norm.running_mean, torch.cat([a, b]).mean(0))
