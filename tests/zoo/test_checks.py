"""The measurements against a network cut by hand: right, they find nothing; with a planted fault, they find it."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from .checks import Subject, effect, gradient_mismatch, kept, masks, mismatch, roads, smallest_share
from .convolutional import rows
from .entry import Entry

D = 8


def network():
    return nn.Sequential(nn.Linear(20, D), nn.BatchNorm1d(D), nn.ReLU(), nn.Linear(D, 5))


class ByHand:
    """Gates on the one hidden layer of `network`, written out. `fault` plants an error that the checks must find."""

    d = D

    def __init__(self, model, fault=None):
        self.model, self.fault = model, fault

    @contextlib.contextmanager
    def masked(self, mask):
        where = self.model[1] if self.fault == "gate before the norm" else self.model[3]
        if self.fault == "masks do nothing":
            mask = torch.ones(D)
        handle = where.register_forward_pre_hook(lambda _, args: args[0] * mask.to(args[0].dtype))
        yield
        handle.remove()

    def canonical(self, mask):
        return mask.clone()

    def compact(self, mask):
        keep = mask.nonzero().flatten()
        if self.fault == "masks do nothing":
            keep = torch.arange(D)
        reads = keep.flip(0) if self.fault == "columns in another order" else keep
        small = copy.deepcopy(self.model)
        for layer in (small[0], small[1]):
            layer.weight, layer.bias = nn.Parameter(layer.weight[keep]), nn.Parameter(layer.bias[keep])
        small[1].running_mean, small[1].running_var = small[1].running_mean[keep], small[1].running_var[keep]
        small[3].weight = nn.Parameter(small[3].weight[:, reads])
        if self.fault == "gradients stop":
            small[0].weight.requires_grad_(False)
        return small

    def cost(self, kind):
        per_unit = {"weights": 25, "macs": 100, "units": 1, "parameters": 28}[kind]  # a batch of 4; 21 + 2 + 5
        constant = 5 if kind == "parameters" else 0
        if kind == "macs" and self.fault == "cost off by one":
            constant = 1
        return lambda mask: mask.double().sum() * per_unit + constant


def subject(fault=None):
    entry = Entry("by hand", "mlp", network, rows(4))
    model = entry.build()
    return Subject(entry, model, ByHand(model, fault), entry.inputs())


MASK = masks(SimpleNamespace(d=D), 3)[1]


def test_nothing_is_found_where_nothing_is_wrong():
    it = subject()
    assert 0 < MASK.sum() < D
    assert max(mismatch(it, MASK)) < 1e-13
    assert effect(it, MASK) > 1e-3
    assert max(gradient_mismatch(it, MASK)) < 1e-12
    assert smallest_share(it) == 0
    for numbers in roads(it, MASK).values():
        assert len(set(numbers)) == 1


def test_kept_elements_are_those_of_the_mask_and_the_model_is_left_as_it_was():
    it = subject()
    before = {name: value.clone() for name, value in it.model.state_dict().items()}
    keep = MASK.nonzero().flatten()
    where = kept(it, MASK)
    assert torch.equal(where["0.bias"], 20 * D + keep)  # after the 20 x D elements of the first weight
    assert torch.equal(where["3.weight"], 23 * D + torch.arange(5 * D).reshape(5, D)[:, keep])
    assert all(torch.equal(value, before[name]) for name, value in it.model.state_dict().items())


@pytest.mark.parametrize("fault", ["gate before the norm", "columns in another order"])
def test_a_wrong_cut_is_found(fault):
    it = subject(fault)
    assert min(mismatch(it, MASK)) > 1e-3
    assert max(gradient_mismatch(it, MASK)) > 1e-3


def test_masks_that_do_nothing_are_found():
    it = subject("masks do nothing")
    assert max(mismatch(it, MASK)) < 1e-13
    assert effect(it, MASK) == 0
    assert len(set(roads(it, MASK)["weights"])) > 1


def test_a_wrong_cost_is_found():
    numbers = roads(subject("cost off by one"), MASK)
    assert numbers["macs"][0] == numbers["macs"][1] + 1


def test_gradients_that_stop_are_found():
    assert max(gradient_mismatch(subject("gradients stop"), MASK)) > 1e-3


def test_masks_go_from_dense_to_empty():
    drawn = masks(SimpleNamespace(d=1000), 20)
    shares = [mask.mean().item() for mask in drawn]
    assert len(drawn) == 21
    assert shares[0] > 0.9
    assert shares[19] < 0.05
    assert shares[20] == 0
