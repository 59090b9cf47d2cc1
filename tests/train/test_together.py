"""fit runs the masks of an update in one pass: the numbers of one mask at a time, and a way back where it must."""

from __future__ import annotations

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier.train import Recipe, pytree
from espalier.train.gradients import OnePass, Update

(X, Y), _ = networks.digit_vectors(320)
(IMAGES, _), _ = networks.digit_images(320)
X, IMAGES = X.double(), IMAGES.double()
SEARCHING = {"begin": 0.0, "ramp": 0.5, "settle": 0.0, "initial": 0.9}


def used(monkeypatch: pytest.MonkeyPatch, allowed: bool = True) -> list[int]:
    """How many masks ran in each pass. allowed: False takes the old road always."""
    passes: list[int] = []
    original = OnePass.__call__

    def call(self, update):
        if not allowed:
            return update.one_at_a_time()
        gradient = original(self, update)
        if self.seen is not None:
            passes.append(len(update.masks))
        return gradient

    monkeypatch.setattr(OnePass, "__call__", call)
    return passes


def short(model: nn.Module, inputs: Tensor = X, signal: str = "slopes", samples: int = 2, **more) -> espalier.Result:
    torch.manual_seed(0)
    recipe = Recipe(signal=signal, **SEARCHING)
    data = more.pop("data", (inputs, Y))
    more = {"loss": F.cross_entropy, "target": 0.5, "batch_size": 16} | more
    return espalier.fit(model, data, epochs=1, samples=samples, recipe=recipe, device="cpu", quiet=True, **more)


def conv() -> nn.Module:
    return networks.resnet(4).double()


@pytest.mark.parametrize("signal", ["slopes", "ranked"])
@pytest.mark.parametrize(("kind", "samples"), [("mlp", 2), ("mlp", 3), ("resnet", 3), ("resnet, channels last", 2)])
def test_twenty_updates_are_those_of_one_mask_at_a_time(kind, signal, samples, monkeypatch) -> None:
    inputs = X if kind == "mlp" else IMAGES
    make = (lambda: networks.mlp().double()) if kind == "mlp" else conv
    results = []
    for allowed in (False, True):
        with monkeypatch.context() as patch:
            passes = used(patch, allowed)
            model = make()
            results.append((short(model, inputs, signal, samples, channels_last="last" in kind), model.state_dict()))
    assert passes == [samples] * 20
    (old, before), (new, after) = results
    torch.testing.assert_close(new.theta, old.theta, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-11)
    assert torch.equal(new.mask, old.mask)
    for ours, theirs in zip(new.history, old.history, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
        assert ours["error"] == theirs["error"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.reshape(-1, 8, 8))[0][:, -1])


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = networks.mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - x.mean(0))


class Looks(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (0.5 if len(x) > 16 else 1.0)


class Counts(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.net(x)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OwnLoss(Centred):
    def forward(self, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(pixels)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


REFUSED = {
    "masks on weights": (Recurrent, "the mask acts on the weight"),
    "mixes examples": (Centred, "its examples depend on each other"),
    "looks at the batch size": (Looks, "its examples depend on each other"),
    "a buffer of its own": (Counts, "buffer calls ends otherwise"),
    "a norm of its own": (
        lambda: nn.Sequential(nn.Linear(64, 12), OwnNorm(12), nn.ReLU(), nn.Linear(12, 10)),
        "1 is a OwnNorm",
    ),
    "the model's own loss": (OwnLoss, "its output holds something that is not of single examples"),
}


@pytest.mark.parametrize("signal", ["slopes", "ranked"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_forbids_one_pass_trains_one_mask_at_a_time(name, signal, monkeypatch) -> None:
    make, why = REFUSED[name]
    more = {"data": {"pixels": X, "labels": Y}, "loss": None} if make is OwnLoss else {}
    example = {"pixels": X[:4], "labels": Y[:4]} if make is OwnLoss else X[:4]
    results = []
    for allowed in (False, True):
        with monkeypatch.context() as patch:
            passes = used(patch, allowed)
            torch.manual_seed(0)
            model = make().double()
            gated = espalier.attach(model, example)
            results.append((short(gated, signal=signal, **more).theta, model.state_dict()))
    assert passes == []
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert f"several masks run one at a time, not in one pass: {why}" in " ".join(gated.explain().split())


@pytest.mark.parametrize("slopes", [True, False])
def test_a_mask_without_a_finite_loss_spoils_the_gradient_and_nothing_else(slopes) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10)).double()
    gated = espalier.attach(model, X[:4])
    masks = (torch.rand(3, gated.d, generator=torch.Generator().manual_seed(1)) < 0.6).float()
    batch, parameters, calls = (X[:24], Y[:24]), list(model.parameters()), list[int]()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        """Infinite for the second of each three masks: its outputs come through a square root at 0."""
        calls.append(1)
        bad = len(calls) % 3 == 2
        return F.cross_entropy(outputs / (outputs * 0.0).abs().sqrt().sum() if bad else outputs, targets)

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        value = loss(model(inputs), targets)
        value.backward()
        return value

    before = {name: value.clone() for name, value in model.state_dict().items()}
    update = Update(gated, masks, pytree.split(batch, 3) if slopes else [batch], parameters, closure, slopes)
    found = []
    for way in (Update.one_at_a_time, OnePass(model, loss)):
        model.load_state_dict(before)
        calls.clear()
        losses, rows = way(update)
        assert losses.isfinite().tolist() == [True, False, True]
        assert all(parameter.grad is None for parameter in parameters)
        ends = {name: value.clone() for name, value in model.state_dict().items()}
        found.append((losses, rows[0][[0, 2]] if slopes else losses, ends))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12, equal_nan=True)


def test_parts_that_are_not_equal_go_one_at_a_time(monkeypatch) -> None:
    passes = used(monkeypatch)
    batches = [(X[i : i + 15], Y[i : i + 15]) for i in range(0, 150, 15)]
    short(networks.mlp().double(), data=batches, samples=2)
    assert passes == [2] * 10  # 30 examples in two parts of 15
    passes.clear()
    short(networks.mlp().double(), data=(X[:31], Y[:31]), samples=2)
    assert passes == []


def test_the_masks_of_an_update_need_the_memory_of_a_plain_one() -> None:
    """What autograd keeps for the backward pass, of as many examples."""

    def kept(run) -> int:
        seen: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run()
        return sum(seen.values())

    model = conv()
    images, labels = IMAGES[:64], Y[:64]
    plain = kept(lambda: F.cross_entropy(model(images), labels))
    gated = espalier.attach(model, IMAGES[:4])
    masks = (torch.rand(2, gated.d) < 0.7).float()
    with gated.masked(masks):
        model(images)  # the trial
        several = kept(lambda: F.cross_entropy(model(images), labels))
    with gated.masked(masks, slopes=True):
        slopes = kept(lambda: F.cross_entropy(model(images), labels))
    assert several < 1.2 * plain
    assert slopes < 1.2 * plain
