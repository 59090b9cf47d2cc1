"""Several masks in one pass: where examples lie, BatchNorm's statistics, copies, nesting, and what is refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier
from espalier import BadInput, Gate
from espalier.models import MLP, DenseNet

from .nets import NETS, Recurrent, Tied

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def conv(**norm):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, **norm), nn.ReLU(), nn.Conv2d(8, 6, 3, padding=1),
        nn.BatchNorm2d(6, **norm), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


class Windows(nn.Module):
    """Tokens as rows ``(N * T, C)`` between two layers, with BatchNorm over them."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down, self.head = nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 6), nn.Linear(6, 2)

    def forward(self, x):
        rows = torch.tanh(self.norm(self.up(x.reshape(-1, x.shape[-1]))))
        return self.head(F.gelu(self.down(rows)).reshape(len(x), -1, 6).mean(1))


class Frames(nn.Module):
    """Frames of a film as images of their own, ``(N * T, C, H, W)``, with BatchNorm over them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 7, 3), nn.BatchNorm2d(7), nn.Conv2d(7, 4, 3)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        h = self.second(torch.relu(self.norm(self.first(x.flatten(0, 1)))))
        return self.head(torch.relu(h).mean((2, 3)).unflatten(0, x.shape[:2]).mean(1))


class TimeFirst(nn.Module):
    """Sequence first inside, ``(T, N, C)``, where T may be a multiple of N."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(5, 9), nn.Linear(9, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))).cumsum(0)[-1])


class GivesTimeFirst(TimeFirst):
    def forward(self, x):
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x.transpose(0, 1))))))


class Shared(nn.Module):
    """One placed gate read twice, and one on channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.wide = nn.Conv2d(3, 4, 3), Gate(4, dim=1)
        self.gate = Gate((3, 2), dim=-1)
        self.first, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x):
        h = torch.tanh(self.first(self.wide(torch.relu(self.stem(x))).mean((2, 3))))
        return self.left(self.gate(h)) + torch.sigmoid(self.right(self.gate(h)))


CASES = {
    "conv": (conv, (3, 6, 6)),
    "conv, cumulative statistics": (lambda: conv(momentum=None), (3, 6, 6)),
    "conv, no statistics kept": (lambda: conv(track_running_stats=False), (3, 6, 6)),
    "conv, momentum 0.3, no affine": (lambda: conv(momentum=0.3, affine=False), (3, 6, 6)),
    "windows": (Windows, (4, 5)),
    "frames": (Frames, (3, 2, 6, 6)),
    "time first": (TimeFirst, (12, 5)),
    "output time first": (GivesTimeFirst, (12, 5)),
    "placed": (lambda: MLP(7, (6, 5), 3), (7,)),
    "placed, shared": (Shared, (3, 6, 6)),
    "placed, connections": (lambda: DenseNet(depth=13, growth=3, classes=4, stem=4), (3, 8, 8)),
    "residual": (NETS["residual"][0], (3, 6, 6)),
    "mlp": (NETS["mlp"][0], (7,)),
}


def setting(make, shape, samples, each=3):
    torch.manual_seed(0)
    model = make().double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    x = torch.randn(each * samples, *shape, dtype=torch.float64)
    gated = espalier.attach(model, x[:4])
    generator = torch.Generator().manual_seed(1)
    return model, gated, x, (torch.rand(samples, gated.d, generator=generator) < 0.6).float()


def loss_of(out):
    return (out * torch.cos(torch.arange(out.numel()).to(out)).reshape(out.shape)).mean()


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def learned(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def alone(model, gated, x, masks):
    """Losses, slopes and mean gradients, one mask at a time."""
    losses, slopes = [], []
    for s, mask in enumerate(masks):
        with gated.masked(mask, slopes=True) as read:
            loss = loss_of(model(x[s :: len(masks)]))
            (loss / len(masks)).backward()
            slopes.append(read() * len(masks))
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(slopes), learned(model)


def together(model, gated, x, masks):
    with gated.masked(masks, slopes=True) as read:
        losses = torch.stack([loss_of(out) for out in gated.apart(model(x), len(masks))])
        losses.mean().backward()
        slopes = read()
    return losses.detach(), slopes, learned(model)


IMAGES = [name for name, (_, shape) in CASES.items() if len(shape) == 3]
LAYOUTS = [*((name, "as made") for name in CASES), *((name, "channels last") for name in IMAGES)]


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_losses_slopes_gradients_and_statistics_of_one_mask_at_a_time(name, layout, samples):
    make, shape = CASES[name]
    model, gated, x, masks = setting(make, shape, samples)
    if layout == "channels last":
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        seen = []
        last = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        for norm in last:
            norm.register_forward_hook(
                lambda _, __, out: seen.append(out.is_contiguous(memory_format=torch.channels_last))
            )
    before = state(model)
    expected = alone(model, gated, x, masks)
    after = state(model)
    model.load_state_dict(before)
    got = together(model, gated, x, masks)
    torch.testing.assert_close(got, expected, **CLOSE)
    torch.testing.assert_close(state(model), after, **CLOSE)
    assert float(expected[1].abs().max()) > 0
    if layout == "channels last" and last:
        assert all(seen), "BatchNorm gives images as it got them"


def test_a_sequence_that_becomes_a_multiple_of_the_batch_keeps_its_examples():
    """Where examples lie is known from the trial, not guessed from sizes."""
    model, gated, x, masks = setting(TimeFirst, (5, 5), 2, each=2)
    together(model, gated, x, masks)  # T = 5, N = 4
    longer = torch.randn(4, 8, 5, dtype=torch.float64)  # T = 8 = 2 N
    torch.testing.assert_close(together(model, gated, longer, masks), alone(model, gated, longer, masks), **CLOSE)


def test_eval_mode_uses_the_running_statistics():
    model, gated, x, masks = setting(conv, (3, 6, 6), 2)
    model(x)
    model.eval()
    before = state(model)
    torch.testing.assert_close(together(model, gated, x, masks), alone(model, gated, x, masks), **CLOSE)
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)


def test_a_loss_that_is_the_mean_over_all_examples_gives_each_mask_its_own_slopes():
    model, gated, x, masks = setting(NETS["mlp"][0], (7,), 2)
    y = torch.randint(3, (len(x),))
    with gated.masked(masks, slopes=True) as read:
        F.cross_entropy(model(x), y).backward()
        slopes = read()
    weights = learned(model)
    rows = []
    for s in range(2):
        with gated.masked(masks[s], slopes=True) as read:
            F.cross_entropy(model(x[s::2]), y[s::2]).backward()
            rows.append(read())
    torch.testing.assert_close(slopes, torch.stack(rows), **CLOSE)
    torch.testing.assert_close({n: 2 * g for n, g in weights.items()}, learned(model), **CLOSE)


def test_the_pure_function_is_refused_inside():
    model, gated, x, masks = setting(NETS["mlp"][0], (7,), 2)
    with gated.masked(masks), pytest.raises(BadInput, match="outside of masked"):
        gated.call(dict(model.named_parameters()), masks[0], x)
    with gated.masked(masks[0]):
        assert gated.call(model.state_dict(), masks[1], x).shape == (6, 3)


def test_one_mask_in_a_row_is_one_mask():
    model = Recurrent().double()  # whose masks are on weights
    x = torch.randn(3, 5, 3, dtype=torch.float64)
    gated = espalier.attach(model, x)
    mask = (torch.arange(gated.d) % 2).float()
    with gated.masked(mask[None], slopes=True) as read:
        out = model(x)
        out.sum().backward()
        assert read().shape == (1, gated.d)
    with gated.masked(mask):
        assert torch.equal(model(x), out)


def test_nested_masks_end_where_they_end():
    model, gated, x, masks = setting(conv, (3, 6, 6), 2)
    model.eval()
    plain = model(x)
    with gated.masked(masks):
        both = model(x)
        with gated.masked(masks[1]):
            one = model(x)
            with gated.masked(masks.flip(0)):
                torch.testing.assert_close(model(x)[::2], one[::2], **CLOSE)
            assert torch.equal(model(x), one)
        assert torch.equal(model(x), both)
    torch.testing.assert_close(both[1::2], one[1::2], **CLOSE)
    assert torch.equal(model(x), plain)


def test_a_failure_inside_leaves_the_model_as_it_was():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
            self.fails = False

        def forward(self, x):
            h = self.norm(self.first(x))
            if self.fails:
                raise ValueError("here")
            return self.second(torch.relu(h))

    model, gated, x, masks = setting(Failing, (4,), 2)
    with gated.masked(masks):
        model(x)
    before = model.eval()(x)
    model.train()
    model.fails = True
    with pytest.raises(ValueError, match="here"), gated.masked(masks):
        model(x)
    model.fails = False
    # one example for each mask: BatchNorm itself fails, as it does one at a time
    with pytest.raises(BadInput, match="more than 1 value"), gated.masked(masks):
        model(x[:2])
    norm = model.norm
    assert (norm.weight.shape, norm.running_mean.shape, norm.momentum) == ((6,), (6,), 0.1)
    assert isinstance(norm.weight, nn.Parameter)
    with pytest.raises(BadInput, match="a multiple of 2 examples, not 5"), gated.masked(masks):
        model(x[:5])
    with pytest.raises(BadInput, match="call the whole model"), gated.masked(masks):
        model.second(torch.ones(4, 6, dtype=torch.float64))
    assert model.eval()(x).shape == before.shape
    with gated.masked(masks[0]):
        assert model(x).isfinite().all()


def test_a_failure_of_batchnorm_puts_its_parameters_back():
    model, gated, x, masks = setting(conv, (3, 6, 6), 2)
    with gated.masked(masks):
        model(x)
        with pytest.raises(RuntimeError):
            model[1](torch.ones(6, 5, 2, 2, dtype=torch.float64))  # five channels where there are eight
    assert (model[1].weight.shape, model[1].running_mean.shape, model[1].momentum) == ((8,), (8,), 0.1)


def test_copies_made_inside_run_under_the_masks_until_they_end():
    model, gated, x, masks = setting(conv, (3, 6, 6), 2)
    model.eval()
    plain = model(x)
    with gated.masked(masks):
        twin = copy.deepcopy(model)
        both = model(x)
        assert torch.equal(twin(x), both)
        with gated.masked(masks[0]):
            assert torch.equal(twin(x), both)
        second = copy.deepcopy(twin)
        assert torch.equal(second(x[:4]), both[:4])
    for made in (twin, second, copy.deepcopy(twin)):
        assert torch.equal(made(x), plain)
    with gated.masked(masks):
        torch.testing.assert_close(gated.compact(masks[0])(x)[::2], both[::2], rtol=1e-9, atol=1e-9)
    again = espalier.attach(twin, x)
    with again.masked(masks):
        torch.testing.assert_close(twin(x), both, **CLOSE)


def test_detached_gates_leave_nothing_behind():
    model, gated, x, masks = setting(conv, (3, 6, 6), 2)
    before = state(model)
    with gated.masked(masks):
        model(x)
        gated.detach()
        assert model(x).shape == (6, 3)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(key.startswith("_espalier") for m in model.modules() for key in vars(m))
    assert list(state(model)) == list(before)
    with pytest.raises(BadInput, match="detached"), gated.masked(masks):
        pass


def test_the_trial_leaves_no_trace():
    model, gated, x, _ = setting(lambda: nn.Sequential(conv(), nn.Dropout(0.5)), (3, 6, 6), 2)
    before, random = state(model), torch.get_rng_state()
    assert gated.one_at_a_time(x) == ""
    torch.testing.assert_close(state(model), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert "one at a time" not in gated.explain()


# ---- what cannot run in one pass -------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.weight = nn.Parameter(torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Centred(Two):
    """The mean of the batch goes off the input: examples of different masks would see each other."""

    def forward(self, x):
        return super().forward(x - x.mean(0))


class MixesLater(Two):
    """Mixes examples by a weight that is 0 today."""

    def forward(self, x):
        out = super().forward(x)
        return out + self.weight * out.mean(0)


class Looks(Two):
    """Hand-written code that looks at the number of examples."""

    def forward(self, x):
        return super().forward(x) * (2.0 if len(x) > 4 else 1.0)


class Draws(Two):
    def forward(self, x):
        h = super().forward(x)
        return h * torch.bernoulli(torch.full_like(h[:, :1], 0.5)) if self.training else h


class Counts(Two):
    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x)


class ByTime(Two):
    """Rows time after time, ``(T * N, C)``: they do not lie as examples do."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], -1)).mean(0)


class Sums(Two):
    def forward(self, x):
        out = super().forward(x)
        return out, out.mean()


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + 1.0


REFUSED = {
    "mixes": (Centred, (4,), "its examples depend on each other"),
    "mixes later": (MixesLater, (4,), "its examples depend on each other"),
    "looks": (Looks, (4,), "its examples depend on each other"),
    "draws": (Draws, (4,), "it draws random numbers"),
    "counts": (Counts, (4,), "buffer calls ends otherwise"),
    "by time": (ByTime, (3, 4), "its examples depend on each other, or change places"),
    "sums": (Sums, (4,), "its output holds something that is not of single examples"),
    "own norm": (
        lambda: nn.Sequential(nn.Linear(4, 6), OwnNorm(6), nn.ReLU(), nn.Linear(6, 3)),
        (4,),
        "1 is a OwnNorm, a BatchNorm with a forward pass of its own",
    ),
    "recurrent": (Recurrent, (5, 3), "the mask acts on the weight rnn.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_forbids_one_pass_is_named(name):
    make, shape, why = REFUSED[name]
    torch.manual_seed(0)
    model = make().train()
    x = torch.randn(8, *shape)
    gated = espalier.attach(model, x[:3])
    explained = f"several masks run one at a time, not in one pass: {why}"
    if name != "looks":  # three examples are too few for it to show
        assert explained in " ".join(gated.explain().split())
    masks = (torch.rand(2, gated.d) < 0.6).float()
    with pytest.raises(BadInput, match=f"cannot run in one pass on this model: {why}"), gated.masked(masks):
        model(x)
    assert gated.one_at_a_time(x).startswith(why)
    assert explained in " ".join(gated.explain().split())
    with gated.masked(masks[0]):
        model(x)


def test_tied_weights_are_masked_as_weights():
    torch.manual_seed(0)
    gated = espalier.attach(Tied(), torch.randint(11, (3, 5)))
    assert gated.one_at_a_time().startswith("the mask acts on the weight")


def test_another_number_of_examples_is_tried_anew():
    torch.manual_seed(0)
    model = Looks()
    gated = espalier.attach(model, torch.randn(2, 4))
    masks = (torch.rand(2, gated.d) < 0.6).float()
    with gated.masked(masks):
        model(torch.randn(4, 4))
        with pytest.raises(BadInput, match="depend on each other"):
            model(torch.randn(6, 4))
        model(torch.randn(4, 4))


def test_numbers_for_a_mask_are_checked_as_for_one():
    gated = espalier.attach(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(3, 4))
    for bad in (torch.full((2, 6), 0.5), torch.ones(2, 5), torch.ones(0, 6), torch.ones(2, 2, 6)):
        with pytest.raises(espalier.BadMask), gated.masked(bad):
            pass


def test_gradient_checkpoints_run_their_part_again_under_the_masks():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)))

    model, gated, x, masks = setting(Checkpointed, (4,), 2)
    torch.testing.assert_close(together(model, gated, x, masks), alone(model, gated, x, masks), **CLOSE)
