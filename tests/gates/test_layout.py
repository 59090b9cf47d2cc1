"""Atoms and layouts: what views, mixing and elementwise operations do to the indices they carry."""

import numpy as np
import pytest

from espalier.gates.trace.layout import Atoms, Block, Layout, Propagation, factor_groups


def axis(p, size, dim=0, shape=None):
    atoms = p.atoms.new(size)
    return Layout(shape or (size,), (Block((dim,), atoms),)), atoms


def classes(p, atoms):
    return len(np.unique(p.atoms.roots(atoms)))


def test_ties_are_transitive_and_freezing_reaches_the_whole_class():
    atoms = Atoms()
    a, b, c = atoms.new(3), atoms.new(3), atoms.new(3)
    atoms.tie(a, b)
    atoms.tie(b[[1]], c[[2]])
    assert atoms.roots(a)[1] == atoms.roots(c)[2]
    assert len(set(atoms.roots(np.concatenate([a, b, c])).tolist())) == 5
    atoms.freeze(c, "because")
    assert atoms.frozen(a).tolist() == [False, True, False]
    assert atoms.why(int(b[1])) == "because"
    atoms.freeze(a, "later")
    assert atoms.why(int(a[1])) == "because"
    assert atoms.why(int(a[0])) == "later"


def test_chains_of_ties_in_one_call():
    atoms = Atoms()
    a = atoms.new(5)
    atoms.tie(a[:-1], a[1:])
    assert len(set(atoms.roots(a).tolist())) == 1


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ((2, 12), (2, 3, 4), [([0], [0]), ([1], [1, 2])]),
        ((2, 3, 4), (6, 4), [([0, 1], [0]), ([2], [1])]),
        ((4, 6), (3, 8), [([0, 1], [0, 1])]),
        ((2, 1, 3), (2, 3), [([0], [0]), ([1, 2], [1])]),
        ((6,), (6, 1, 1), [([0], [0]), ([], [1]), ([], [2])]),
        ((), (1, 1), [([], [0]), ([], [1])]),
    ],
)
def test_reshapes_come_apart_into_equal_products(old, new, expected):
    assert factor_groups(old, new) == expected


def test_flattening_repeats_each_channel_over_its_pixels():
    p = Propagation()
    x, atoms = axis(p, 3, dim=1, shape=(2, 3, 4, 4))
    flat = p.reshaped(x, (2, 48))
    assert np.array_equal(flat.at(1).atoms, np.repeat(atoms, 16))
    back = p.reshaped(flat, (2, 3, 4, 4))
    assert back.at(1).dims == (1,)
    assert np.array_equal(back.at(1).atoms, atoms)


def test_heads_survive_where_their_inside_is_summed_over():
    p = Propagation()
    x, atoms = axis(p, 12, dim=2, shape=(2, 5, 12))
    heads = p.permuted(p.reshaped(x, (2, 5, 3, 4)), (0, 2, 1, 3))
    assert heads.at(1) is heads.at(3)
    after = p.mixed(heads, 3, "summed")
    assert after.at(1).dims == (1,)
    assert after.at(3) is None
    roots = p.atoms.roots(atoms).reshape(3, 4)
    assert all(len(set(row)) == 1 for row in roots.tolist())
    assert len(set(roots[:, 0].tolist())) == 3
    assert not p.atoms.frozen(atoms).any()


def test_an_axis_alone_is_frozen_when_it_is_summed_over():
    p = Propagation()
    x, atoms = axis(p, 4, dim=1, shape=(2, 4))
    assert p.mixed(x, 1, "softmax").blocks == ()
    assert p.atoms.frozen(atoms).all()


def test_a_shuffle_keeps_track_of_every_channel():
    p = Propagation()
    x, atoms = axis(p, 6, dim=1, shape=(1, 6))
    shuffled = p.reshaped(p.permuted(p.reshaped(x, (1, 2, 3)), (0, 2, 1)), (1, 6))
    assert np.array_equal(shuffled.at(1).atoms, atoms.reshape(2, 3).T.reshape(-1))
    p.settle_splits()  # each row of the split must lose as many
    assert classes(p, atoms) == 3


def test_broadcasting_ties_and_a_tensor_of_fixed_size_freezes():
    p = Propagation()
    x, a = axis(p, 4, dim=1, shape=(2, 4, 3))
    y, b = axis(p, 4, dim=0, shape=(4, 1))
    out = p.merged([x, y], (2, 4, 3), "added")
    assert np.array_equal(p.atoms.roots(out.at(1).atoms), p.atoms.roots(b))
    assert not p.atoms.frozen(a).any()
    p.merged([out, Layout((1, 4, 3))], (2, 4, 3), "added")
    assert p.atoms.frozen(a).all()
    assert "fixed size" in p.atoms.why(int(a[0]))


def test_a_scale_inside_heads_is_kept_whole_and_heads_stay_free():
    p = Propagation()
    x, atoms = axis(p, 12, dim=1, shape=(2, 12))
    scale, own = axis(p, 4)
    out = p.merged([p.reshaped(x, (2, 3, 4)), scale], (2, 3, 4), "multiplied")
    assert out.at(1).dims == (1,)
    assert classes(p, atoms) == 3
    assert p.atoms.frozen(own).all()
    assert not p.atoms.frozen(atoms).any()
