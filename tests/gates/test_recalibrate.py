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
