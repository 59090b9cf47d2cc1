"""Datasets of one's own, what a network reads of them, and fixed splits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier import data
from espalier.space import BadInput, BadType


def make(n: int = 12, shape: tuple[int, ...] = (3, 4, 5), dtype: type = np.uint8, classes: int = 3) -> data.Dataset:
    draw = np.random.default_rng(n)
    inputs = draw.integers(0, 256, (n + 5, *shape)).astype(dtype)
    labels = np.arange(n + 5) % classes
    return data.from_arrays((inputs[:n], labels[:n]), (inputs[n:], labels[n:]), scale=1 / 255)


def test_lists_arrays_and_tensors_are_the_same_data():
    x, y = [[0.5, 1.5], [2.5, 3.5]], [1, 0]
    lists = data.from_arrays((x, y), (x, y))
    arrays = data.from_arrays((np.array(x), np.array(y)), (np.array(x), np.array(y, dtype=np.uint8)))
    tensors = data.from_arrays((torch.tensor(x).double(), torch.tensor(y)), (torch.tensor(x).double(), torch.tensor(y)))
    assert lists.fingerprint() == arrays.fingerprint() == tensors.fingerprint()
    assert lists.classes == ("0", "1")
    other = data.from_arrays((x, y), (x, [1, 1]))
    assert other.fingerprint() != lists.fingerprint()


def test_what_a_network_reads():
    own = make().standardised()
    inputs = own.train_inputs.numpy().astype(np.float64) / 255
    mean, std = inputs.mean((0, 2, 3)), inputs.std((0, 2, 3))
    expected = (inputs - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(own.as_floats().train_inputs.numpy(), expected, atol=2e-6)
    exact = own.as_floats(torch.float64)
    np.testing.assert_allclose(exact.train_inputs.numpy(), expected, atol=1e-13)
    # Floats are what is read already; turned again they stay.
    assert torch.equal(exact.as_floats(torch.float64).train_inputs, exact.train_inputs)
    # Flattened before or after, the same numbers are read.
    assert torch.equal(own.flatten().as_floats().test_inputs, own.as_floats().flatten().test_inputs)
    assert own.flatten().shape == (60,)


def test_features_are_standardised_one_by_one_and_constants_survive():
    x = np.array([[1.0, 7.0, 3.0], [5.0, 7.0, -3.0]])
    read = data.from_arrays((x, [0, 1]), (x, [0, 1])).standardised().as_floats(torch.float64).train_inputs
    assert read.tolist() == [[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]


def test_mnist_is_read_between_0_and_1(small_idx, tmp_path):
    small_idx.write(tmp_path)
    read = data.load("mnist", tmp_path, download=False).flatten().as_floats().train_inputs
    np.testing.assert_allclose(read.numpy(), small_idx.train[0].reshape(30, 784) / 255, rtol=1e-6)


def test_cifar_is_standardised_by_channel(small_cifar, tmp_path):
    small_cifar.write(tmp_path)
    read = data.load("cifar10", tmp_path, download=False).as_floats().train_inputs
    # The usual four digits of the set's published mean and deviation.
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    expected = (small_cifar.train[0] / 255 - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(read.numpy(), expected, atol=2e-3)


@pytest.mark.parametrize(
    ("train", "test", "error", "says"),
    [
        (([[1.0]], [0]), (np.zeros((0, 1)), np.zeros(0, int)), BadInput, "the test part is empty"),
        ((np.zeros((3, 0)), [0, 0, 0]), ([[1.0]], [0]), BadInput, "the training part is empty"),
        (([[1.0], [2.0]], [0]), ([[1.0]], [0]), BadInput, "2 inputs, but 1 labels"),
        (([1.0, 2.0], [0, 1]), ([[1.0]], [0]), BadInput, r"inputs \(n, \*shape\)"),
        (([[1.0]], [[0]]), ([[1.0]], [0]), BadInput, r"labels \(n,\)"),
        (([[1.0], [float("nan")]], [0, 1]), ([[1.0]], [0]), BadInput, "training input 1 is not finite"),
        (([[1.0]], [0]), ([[float("inf")]], [0]), BadInput, "test input 0 is not finite"),
        (([[1.0]], [-1]), ([[1.0]], [0]), BadInput, "count from 0; there is a -1"),
        (([[1.0]], [3]), ([[1.0]], [0]), BadInput, "there is a label 3, but 2 classes"),
        (([[1.0]], [0]), ([[1.0, 2.0]], [0]), BadInput, r"of shape \(1,\), test inputs of \(2,\)"),
        (([[1]], [0]), ([[1]], [0]), BadType, "uint8 or floating, not torch.int64"),
        (([[1.0]], [0.5]), ([[1.0]], [0]), BadType, "labels are integers, not torch.float64"),
    ],
)
def test_arrays_that_cannot_be_used(train, test, error, says):
    with pytest.raises(error, match=says):
        data.from_arrays(train, test, classes=("no", "yes"))


def test_a_mean_of_another_shape_is_refused():
    from dataclasses import replace

    with pytest.raises(BadInput, match="mean of shape"):
        replace(make(), mean=torch.zeros(7))


def test_holding_out_never_touches_the_test_part():
    own = make(120)
    tuned = own.hold_out(30, seed=4)
    rows = [bytes(row) for row in own.train_inputs.flatten(1).numpy()]
    parts = [bytes(row) for part in (tuned.train_inputs, tuned.test_inputs) for row in part.flatten(1).numpy()]
    assert sorted(rows) == sorted(parts)
    assert len(tuned.test_labels) == 30
    assert "30 held out, seed 4" in tuned.name
    assert tuned.fingerprint() == own.hold_out(30, seed=4).fingerprint() != own.hold_out(30, seed=5).fingerprint()
    by_image = dict(zip(rows, own.train_labels.tolist()))
    assert all(
        by_image[bytes(row)] == label
        for row, label in zip(tuned.test_inputs.flatten(1).numpy(), tuned.test_labels.tolist())
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.integers(0, 2**32), st.data())
def test_held_out_by_class(labels, seed, drawn):
    y = np.array(labels)
    count = drawn.draw(st.integers(1, len(y) - 1))
    kept, held = data.held_out(y, count, seed)
    assert len(held) == count
    assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(y)))
    for label in np.unique(y):
        assert abs((y[held] == label).sum() - (y == label).sum() * count / len(y)) < 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(2, 6), st.integers(0, 2**32))
def test_folds_are_level(labels, k, seed):
    y = np.array(labels)
    y = np.concatenate([y, np.repeat(np.unique(y), k)])  # every class can be in every fold
    parts = data.folds(y, k, seed)
    assert np.array_equal(np.sort(np.concatenate([held for _, held in parts])), np.arange(len(y)))
    sizes = [len(held) for _, held in parts]
    assert max(sizes) - min(sizes) <= 1
    for kept, held in parts:
        assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(len(y)))
    for label in np.unique(y):
        counts = [(y[held] == label).sum() for _, held in parts]
        assert max(counts) - min(counts) <= 1


def test_folds_of_digits():
    images, labels = data.all_digits()
    parts = data.folds(labels.numpy(), 10, seed=1)
    own = data.from_arrays((images, labels), (images[:1], labels[:1])).take(*parts[0])
    assert (len(own.train_labels), len(own.test_labels)) == (1617, 180)
    assert not np.array_equal(parts[0][1], data.folds(labels.numpy(), 10, seed=2)[0][1])


def test_splits_never_move():
    """Written down once: another number here would mean that tuned and reported data got mixed between versions."""
    y = np.arange(20) % 2
    assert data.held_out(y, 4, seed=0)[1].tolist() == [2, 3, 11, 18]
    assert [held.tolist() for _, held in data.folds(y, 4, seed=3)] == [
        [0, 1, 3, 12, 14],
        [2, 4, 6, 13, 19],
        [5, 9, 16, 17, 18],
        [7, 8, 10, 11, 15],
    ]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: data.held_out([0, 1], 2), BadInput, "2 examples cannot be held out of 2"),
        (lambda: data.held_out([0, 1], 0), BadInput, "at least 1, not 0"),
        (lambda: data.held_out([0, 1], 1.5), BadType, "is an integer, not 1.5"),
        (lambda: data.held_out([0, 1], 1, -1), BadInput, "seed is at least 0, not -1"),
        (lambda: data.held_out([0.5, 1], 1), BadType, "labels"),
        (lambda: data.held_out([[0, 1]], 1), BadType, "labels"),
        (lambda: data.folds([0, 0, 1], 2), BadInput, "class 1 has 1 examples, too few to be in each of 2 folds"),
        (lambda: data.folds([0, 0], 1), BadInput, "folds is at least 2, not 1"),
    ],
)
def test_splits_that_cannot_be(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_pairs_are_asked_for_as_pairs():
    x, y = [[0.0], [1.0]], [0, 1]
    with pytest.raises(BadType, match=r"train is a pair \(inputs, labels\), not ndarray: from_arrays\(\(x, y\), "):
        data.from_arrays(np.array(x), np.array(y))
    with pytest.raises(BadType, match="test is a pair"):
        data.from_arrays((x, y), (x, y, y))
