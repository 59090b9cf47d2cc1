"""Batches made on the device, and the order in which each run reads the data."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier import data
from espalier.data import batches
from espalier.space import BadInput, BadType, Corrupt

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])]


def cut_one(image: np.ndarray, top: int, left: int, flip: bool, pad: int) -> np.ndarray:
    """The definition, one image ``(C, H, W)`` at a time."""
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
    window = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    return window[:, :, ::-1] if flip else window


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("lead", "pad"), [((), 2), ((6,), 4), ((2, 3), 1), ((2, 2, 2), 0)])
def test_crop_and_flip_are_the_definition(device, dtype, lead, pad):
    draw = torch.Generator().manual_seed(pad)
    images = torch.randint(1, 256, (*lead, 3, 5, 7), generator=draw).to(dtype)
    top, left = torch.randint(0, 2 * pad + 1, (2, *lead), generator=draw)
    flip = torch.randint(0, 2, lead, generator=draw).bool()
    result = data.crop_flip(*(t.to(device) for t in (images, top, left, flip)), pad=pad)
    assert (result.dtype, result.shape) == (dtype, images.shape)
    for at in itertools.product(*map(range, lead)):
        expected = cut_one(images[at].numpy(), int(top[at]), int(left[at]), bool(flip[at]), pad)
        assert np.array_equal(result[at].cpu().numpy(), expected)


def test_every_offset_of_one_image():
    image = np.arange(1, 13, dtype=np.uint8).reshape(1, 3, 4)
    offsets = torch.cartesian_prod(torch.arange(5), torch.arange(5), torch.arange(2))
    top, left, flip = offsets.unbind(-1)
    result = data.crop_flip(torch.tensor(image).expand(50, 1, 3, 4), top, left, flip.bool(), pad=2)
    for window, (t, s, f) in zip(result, offsets.tolist()):
        assert np.array_equal(window.numpy(), cut_one(image, t, s, bool(f), 2))


def pipeline(resident, gain, shift, index, top, left, flip):
    return data.crop_flip(data.standardise(data.gather(resident, index), gain, shift), top, left, flip, pad=4)


def prepared(runs: int = 3, batch: int = 4, device: str = "cpu"):
    draw = torch.Generator().manual_seed(0)
    resident = torch.randint(0, 256, (20, 3, 8, 8), generator=draw, dtype=torch.uint8).to(device)
    labels = torch.arange(20) % 2
    own = data.from_arrays((resident.cpu(), labels), (resident.cpu(), labels), scale=1 / 255).standardised().to(device)
    stream = data.Stream(list(range(runs)), n=20, device=device)
    crops = stream.crops(stream.position, 1, batch, pad=4)
    return (resident, *own.affine(), stream.take(1, batch)[0], *(t[0] for t in crops))


def test_gather_then_standardise_is_the_dataset_in_floats():
    resident, gain, shift, index, *_ = prepared()
    labels = torch.arange(20) % 2
    own = data.from_arrays((resident, labels), (resident, labels), scale=1 / 255).standardised()
    batch = data.standardise(data.gather(resident, index), gain, shift)
    assert batch.shape == (3, 4, 3, 8, 8)
    assert torch.equal(batch, own.as_floats().train_inputs[index])


def test_runs_in_one_batch_are_runs_alone_and_vmap_agrees():
    resident, gain, shift, *drawn = prepared()
    together = pipeline(resident, gain, shift, *drawn)
    for run in range(3):
        assert torch.equal(together[run], pipeline(resident, gain, shift, *(t[run] for t in drawn)))
    mapped = torch.vmap(pipeline, in_dims=(None, None, None, 0, 0, 0, 0))(resident, gain, shift, *drawn)
    assert torch.equal(mapped, together)


def test_the_pipeline_is_one_graph():
    arguments = prepared()
    traced = torch.compile(pipeline, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(traced(*arguments), pipeline(*arguments))


@NO_CUDA
@pytest.mark.cuda
def test_the_pipeline_in_a_cuda_graph():
    arguments = prepared(device="cuda")
    pipeline(*arguments)  # warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = pipeline(*arguments)
    arguments[3].copy_((arguments[3] + 1) % 20)  # other examples, same graph
    graph.replay()
    assert torch.equal(result, pipeline(*arguments))
    compiled = torch.compile(pipeline, fullgraph=True, dynamic=False)
    assert torch.allclose(compiled(*arguments), result, atol=1e-6)


def test_the_hash_is_splitmix64():
    """Its published first outputs for seed 0."""
    words = batches._hash(torch.tensor(0), torch.arange(3)).tolist()
    assert [word % 2**64 for word in words] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_orders_never_move():
    """Written down once: a run resumed in another version must read on in the same order."""
    stream = data.Stream([0, 5], n=6)
    top, left, flip = stream.crops(0, 1, 6, pad=4)
    assert stream.take(1, 6).tolist() == [[[4, 3, 1, 0, 2, 5], [2, 4, 5, 0, 1, 3]]]
    assert top[0, 0].tolist() == [6, 1, 7, 5, 7, 2]
    assert left[0, 0].tolist() == [1, 2, 7, 5, 7, 1]
    assert flip[0, 0].int().tolist() == [1, 0, 0, 0, 1, 0]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 50), st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4), st.integers(0, 10**6))
def test_every_order_is_a_permutation(n, seeds, epoch):
    orders = data.epoch_orders(torch.tensor(seeds), epoch, n)
    assert torch.equal(orders.sort(-1).values, torch.arange(n).expand(len(seeds), n))


def test_all_permutations_are_equally_likely():
    """24 permutations over 24,000 runs, over 24,000 epochs, and first against next epoch: chi-square, 23 degrees."""
    code = torch.tensor([64, 16, 4, 1])
    by_run = data.epoch_orders(torch.arange(24_000), 0, 4) @ code
    next_epoch = data.epoch_orders(torch.arange(24_000), 1, 4) @ code
    by_epoch = torch.stack([data.epoch_orders(torch.tensor(5), epoch, 4) for epoch in range(2_400)]) @ code
    for drawn in (by_run, next_epoch, by_epoch):
        counts = torch.bincount(drawn)
        counts = counts[counts > 0].double()
        assert len(counts) == 24
        expected = len(drawn) / 24
        assert ((counts - expected) ** 2 / expected).sum() < 58.6  # exceeded by chance once in 15,000
    assert abs((by_run == next_epoch).double().mean() - 1 / 24) < 0.006


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.data())
def test_a_stream_reads_every_example_once_an_epoch(n, drawn):
    stream = data.Stream([3, 9], n)
    read = []
    while stream.position < 3 * n:
        batch = drawn.draw(st.integers(1, n))
        read.append(stream.take(drawn.draw(st.integers(1, 4)), batch).movedim(0, 1).flatten(1))
    whole = torch.cat(read, 1)
    assert whole.shape[1] == stream.position
    for epoch in range(3):
        part = whole[:, epoch * n : (epoch + 1) * n]
        assert torch.equal(part, data.epoch_orders(torch.tensor([3, 9]), epoch, n))


def test_a_run_reads_the_same_alone_and_beside_others():
    together = data.Stream([11, 12, 13], n=10)
    alone = data.Stream(12, n=10)
    beside = together.crops(0, 7, 4, pad=4)
    for mine, theirs in zip(alone.crops(0, 7, 4, pad=4), beside):
        assert torch.equal(mine, theirs[:, 1])
    first, second = together.take(7, 4), alone.take(7, 4)
    assert first.shape == (7, 3, 4)
    assert second.shape == (7, 4)
    assert torch.equal(first[:, 1], second)
    assert not torch.equal(first[:, 0], first[:, 1])
    assert torch.equal(data.Stream(12, n=10).take(1, 4)[0], second[0])  # one update at a time or many: the same


def test_a_stream_goes_on_exactly_from_its_state():
    stream = data.Stream([1, 2], n=13)
    stream.take(5, 4)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = stream.take(6, 7), stream.crops(20, 6, 7, pad=2)
    resumed = data.Stream([1, 2], n=13)
    resumed.load_state_dict(state)
    assert resumed.position == 20
    assert resumed.epoch == 20 / 13
    assert torch.equal(resumed.take(6, 7), expected[0])
    assert all(torch.equal(a, b) for a, b in zip(resumed.crops(20, 6, 7, pad=2), expected[1]))


def test_a_state_of_another_stream_is_refused():
    stream = data.Stream([1, 2], n=13)
    with pytest.raises(BadInput, match="another stream: n 12, here 13"):
        stream.load_state_dict(data.Stream([1, 2], n=12).state_dict())
    with pytest.raises(BadInput, match=r"another stream: seeds \[1, 3\], here \[1, 2\]"):
        stream.load_state_dict(data.Stream([1, 3], n=13).state_dict())
    with pytest.raises(Corrupt, match="holds"):
        stream.load_state_dict({"position": 3})
    with pytest.raises(BadInput, match="position of a stream is at least 0"):
        stream.load_state_dict({**stream.state_dict(), "position": -1})
    assert stream.position == 0


def test_crops_are_uniform_and_their_own():
    stream = data.Stream([0, 1], n=1000)
    top, left, flip = stream.crops(0, 40, 1000, pad=4)
    for offsets in (top, left):
        share = torch.bincount(offsets.flatten(), minlength=9) / offsets.numel()
        assert len(share) == 9
        assert (share - 1 / 9).abs().max() < 0.006
    assert abs(flip.double().mean() - 0.5) < 0.01
    # Independent of one another, of the other run and of the next example.
    pairs = [(top, left), (top, flip), (top[:, 0], top[:, 1]), (top[..., 1:], top[..., :-1])]
    for a, b in pairs:
        assert abs(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1]) < 0.02
    assert stream.position == 0


def test_orders_stay_out_of_compiled_code():
    """Compiled for the CPU they would write past a buffer: refused in one graph, left out where parts may be."""

    def drawn(seeds):
        return data.epoch_orders(seeds, 2, 50) + 0

    seeds = torch.tensor([1, 2])
    with pytest.raises(RuntimeError, match="drawn outside compiled code"):
        torch.compile(drawn, backend="eager", fullgraph=True)(seeds)
    assert torch.equal(torch.compile(drawn, backend="eager")(seeds), drawn(seeds))


@NO_CUDA
@pytest.mark.cuda
def test_the_gpu_reads_in_the_same_order():
    here, there = data.Stream([1, 2**62], n=997), data.Stream([1, 2**62], n=997, device="cuda")
    assert torch.equal(here.take(50, 64), there.take(50, 64).cpu())
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here.crops(3, 5, 64, 4), there.crops(3, 5, 64, 4)))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: data.Stream(0, n=0), BadInput, "the data are empty"),
        (lambda: data.Stream([], n=4), BadInput, "no seeds, so no runs"),
        (lambda: data.Stream(-1, n=4), BadInput, "seed of a run is at least 0, not -1"),
        (lambda: data.Stream([2**63], n=4), BadInput, "more than torch counts to"),
        (lambda: data.Stream(0.5, n=4), BadType, "is an integer, not 0.5"),
        (lambda: data.Stream(0, n=True), BadType, "examples is an integer, not True"),
        (lambda: data.Stream(0, n=4).take(1, 5), BadInput, "a batch of 5 is larger than the data, 4 examples"),
        (lambda: data.Stream(0, n=4).take(1, 0), BadInput, "the batch is at least 1, not 0"),
        (lambda: data.Stream(0, n=4).take(0, 1), BadInput, "updates is at least 1, not 0"),
        (lambda: data.Stream(0, n=4).crops(0, 1, 1, pad=-1), BadInput, "padding is at least 0, not -1"),
    ],
)
def test_orders_that_cannot_be(call, error, says):
    with pytest.raises(error, match=says):
        call()
