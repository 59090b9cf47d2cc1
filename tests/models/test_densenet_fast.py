"""The fast DenseNet step computes what the readable version computes: loss, errors and gradient."""

import pytest
import torch
from torch.func import functional_call

import espalier
from espalier.models import DenseNet
from espalier.models.densenet_fast import FLAT, FastDenseNet
from espalier.train.batched.batch_engine import strip
from espalier.train.batched.step import Differential, cross_entropy

SMALL = {"depth": 10, "growth": 4, "classes": 5, "stem": 20}  # a block input of more than one chunk from the start


class Problem:
    """R runs of a small DenseNet with weights that all matter, masks, images and classes."""

    def __init__(self, runs=2, samples=2, images=3, size=8, open_=0.6, dtype=torch.float64, device="cpu", **shape):
        rng = torch.Generator().manual_seed(1)
        self.shape = SMALL | shape
        self.gated = espalier.attach(DenseNet(**self.shape), torch.rand(1, 3, 8, 8), check=False)
        strip(self.gated.model)
        self.gated.model.to(device, dtype)

        def random(*shape):
            return torch.randn(shape, generator=rng).to(device, dtype)

        self.params = {
            name: name.endswith("norm.weight") + 0.3 * random(runs, *p.shape)
            for name, p in self.gated.model.named_parameters()
        }
        self.masks = (torch.rand(runs, samples, self.gated.d, generator=rng) < open_).to(device, dtype)
        # Without an open path to the classifier nothing would be compared.
        self.masks[..., self.gated.space.slices["gate"]] = 1
        self.masks[..., self.gated.space.slices["transitions.0.gate"].start] = 1
        self.x = random(runs, images, 3, size, size)
        self.y = torch.randint(0, self.shape["classes"], (runs, images), generator=rng).to(device)

    def readable(self):
        differential = Differential(self.gated.call, cross_entropy)
        grads, (losses, wrong), _ = differential(self.params, {}, self.masks, self.x, self.y, each=False)
        return grads, losses, wrong

    def fast(self, precision="float64", params=None):
        fast = FastDenseNet(**self.shape, precision=precision)
        grads, (losses, wrong), _ = fast(params or self.params, {}, self.masks, self.x, self.y)
        return grads, losses, wrong

    def own_images(self):
        """What each mask reads where it has images of its own, ``(R, S, B, ...)``: every second one mirrored images."""
        parts = [(self.x.flip(-1) if s % 2 else self.x, self.y.roll(s, 1)) for s in range(self.masks.shape[1])]
        return tuple(torch.stack(part, 1) for part in zip(*parts, strict=True))

    def readable_slopes(self):
        differential = Differential(self.gated.call, cross_entropy)
        grads, (losses, wrong), slopes = differential(
            self.params, {}, self.masks, *self.own_images(), each=False, slopes=True
        )
        return grads, losses, wrong, slopes[0]

    def fast_slopes(self, precision="float64", params=None):
        fast = FastDenseNet(**self.shape, precision=precision)
        grads, (losses, wrong), slopes = fast(params or self.params, {}, self.masks, *self.own_images(), slopes=True)
        return grads, losses, wrong, slopes[0]


def compare(mine, theirs, tolerance):
    """Each parameter's gradient relative to the largest of all: some are zero up to rounding."""
    largest = max(float(g.abs().max()) for g in theirs.values())
    assert largest > 1e-3
    assert set(mine) == set(theirs)
    for name, g in theirs.items():
        assert mine[name].shape == g.shape, name
        assert float((mine[name] - g).abs().max()) < tolerance * largest, name


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("shape", [{}, {"depth": 13, "growth": 12, "stem": 16}, {"depth": 7, "growth": 16, "stem": 3}])
def test_gradient_is_that_of_the_readable_version(shape, size):
    problem = Problem(size=size, **shape)
    theirs, losses, wrong = problem.readable()
    mine, fast_losses, fast_wrong = problem.fast()
    assert torch.allclose(fast_losses, losses, rtol=1e-12)
    assert torch.equal(fast_wrong, wrong)
    compare(mine, theirs, 1e-9)


@pytest.mark.parametrize("open_", [2.0, 0.6, 0.3])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("shape", [{}, {"depth": 13, "growth": 12, "stem": 16}, {"depth": 7, "growth": 16, "stem": 3}])
def test_slopes_are_those_of_the_readable_version(shape, samples, open_):
    """Of open gates and of closed ones; gates that are neither, too."""
    problem = Problem(samples=samples, open_=open_, **shape)
    problem.masks[..., 1] *= 1.5
    theirs, losses, wrong, slopes = problem.readable_slopes()
    mine, fast_losses, fast_wrong, fast_slopes = problem.fast_slopes()
    assert torch.allclose(fast_losses, losses, rtol=1e-12)
    assert torch.equal(fast_wrong, wrong)
    compare(mine, theirs, 1e-9)
    for closed in (problem.masks == 0, problem.masks != 0):
        if closed.any():
            assert float(slopes[closed].abs().max()) > 1e-3
    torch.testing.assert_close(fast_slopes, slopes, rtol=1e-9, atol=1e-10)


def test_slopes_are_differences_of_the_loss():
    """A gate opened, or closed, by a little: the loss of its own mask changes by its slope, no other loss does."""
    problem, step = Problem(runs=1), 1e-7
    _, losses, _, slopes = problem.fast_slopes()
    for bit in range(0, problem.gated.d, 3):
        problem.masks[0, 1, bit] += step
        _, changed, _, _ = problem.fast_slopes()
        problem.masks[0, 1, bit] -= step
        assert changed[0, 0] == losses[0, 0]
        assert float(changed[0, 1] - losses[0, 1]) / step == pytest.approx(float(slopes[0, 1, bit]), rel=1e-3, abs=1e-4)


def test_in_float32_up_to_rounding():
    problem = Problem(dtype=torch.float32, images=8)
    theirs, losses, _ = problem.readable()
    mine, fast_losses, _ = problem.fast("float32")
    assert torch.allclose(fast_losses, losses, rtol=1e-5)
    compare(mine, theirs, 1e-4)


def test_runs_at_once_are_each_alone():
    problem = Problem(runs=3)
    together, losses, wrong = problem.fast()
    for run in range(3):
        alone = Problem(runs=3)
        alone.masks, alone.x, alone.y = (t[run : run + 1] for t in (alone.masks, alone.x, alone.y))
        alone.params = {name: p[run : run + 1] for name, p in alone.params.items()}
        grads, loss, errors = alone.fast()
        assert torch.allclose(loss, losses[run : run + 1], rtol=1e-12)
        assert torch.equal(errors, wrong[run : run + 1])
        compare(grads, {name: g[run : run + 1] for name, g in together.items()}, 1e-10)


def test_all_gates_open_is_the_plain_network():
    problem = Problem(runs=1, samples=1, open_=2.0)
    leaves = {name: p[0].clone().requires_grad_() for name, p in problem.params.items()}
    plain = DenseNet(**problem.shape).double()
    loss = torch.nn.functional.cross_entropy(functional_call(plain, leaves, (problem.x[0],)), problem.y[0])
    theirs = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
    mine, losses, _ = problem.fast()
    assert losses.item() == pytest.approx(loss.item(), rel=1e-12)
    compare({name: g[0] for name, g in mine.items()}, theirs, 1e-9)


def test_closed_gates_are_the_compact_network():
    problem = Problem(runs=1, samples=2, open_=0.5)
    problem.masks = problem.gated.canonical(problem.masks)
    gated = espalier.attach(DenseNet(**problem.shape).double(), torch.rand(1, 3, 8, 8).double(), check=False)
    gated.model.load_state_dict({k: p[0] for k, p in problem.params.items()}, strict=False)
    _, losses, wrong = problem.fast()
    for sample in range(2):
        small = gated.compact(problem.masks[0, sample]).train()
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in gated.model.parameters())
        out = small(problem.x[0])
        assert losses[0, sample].item() == pytest.approx(cross_entropy(out, problem.y[0]).item(), rel=1e-9)
        assert wrong[0, sample] == (out.argmax(-1) != problem.y[0]).sum()


def test_a_closed_gate_has_no_gradient_and_reads_nothing():
    problem = Problem(runs=1)
    reads = problem.gated.space.slices["blocks.1.1.gate"]
    problem.masks[..., reads.start + 1] = 0  # the second block's second layer does not read its first
    width = problem.params["blocks.1.0.norm.weight"].shape[1]
    there = slice(width, width + 4)
    mine, losses, _ = problem.fast()
    changed = {name: p.clone() for name, p in problem.params.items()}
    changed["blocks.1.1.conv.weight"][:, :, there] += 1
    assert torch.equal(problem.fast(params=changed)[1], losses)
    for part in ("norm.weight", "norm.bias"):
        assert not mine[f"blocks.1.1.{part}"][:, there].any()
        assert mine[f"blocks.1.1.{part}"].any()
    assert not mine["blocks.1.1.conv.weight"][:, :, there].any()


def test_scaled_gates_scale():
    problem = Problem()
    problem.masks *= 1.5
    theirs, losses, _ = problem.readable()
    mine, fast_losses, _ = problem.fast()
    assert torch.allclose(fast_losses, losses, rtol=1e-12)
    compare(mine, theirs, 1e-9)


def test_packed_weights_are_the_named_ones():
    problem = Problem(runs=3)
    fast = FastDenseNet(**problem.shape)
    packed = fast.pack(problem.params)
    assert packed[FLAT].shape == (3, sum(p[0].numel() for p in problem.params.values()))
    again = fast.unpack(packed)
    assert list(again) == list(problem.params)
    assert all(torch.equal(again[name], p) for name, p in problem.params.items())
    named, _, _ = problem.fast()
    flat, _, _ = problem.fast(params=packed)
    assert torch.equal(flat[FLAT], fast.pack(named)[FLAT])
    with pytest.raises(espalier.BadInput, match=r"head\.bias"):
        fast.pack({name: p for name, p in problem.params.items() if name != "head.bias"})


def test_a_run_that_diverged_shows_and_leaves_the_others_alone():
    problem = Problem(runs=2, open_=2.0)
    _, before, _ = problem.fast()
    problem.params["blocks.1.1.conv.weight"][0, 0, 0, 0, 0] = torch.inf
    grads, losses, _ = problem.fast()
    assert not losses[0].isfinite().any()
    assert torch.equal(losses[1], before[1])
    assert all(g[1].isfinite().all() for g in grads.values())


@pytest.mark.parametrize("shape", [(40, 12, 10, 16, 3), (10, 4, 7, 8, 1)])
def test_parameters_and_gates_are_the_readable_ones(shape):
    model, fast = DenseNet(*shape), FastDenseNet(*shape)
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == list(fast.shapes.items())
    assert fast.d == sum(len(m.sizes) for m in model.modules() if isinstance(m, espalier.Gate))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"growth": 17}, "at most 16 channels per layer, not 17"),
        ({"depth": 41}, "not 41"),
        ({"precision": "half"}, "not 'half'"),
    ],
)
def test_what_it_cannot_do_is_refused(arguments, said):
    with pytest.raises(espalier.BadInput, match=said):
        FastDenseNet(**arguments)


def test_images_that_do_not_halve_twice_are_refused():
    problem = Problem()
    problem.x = problem.x[..., :6, :6]
    with pytest.raises(espalier.BadInput, match="divisible by 4, not 6"):
        problem.fast()
