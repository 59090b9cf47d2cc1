"""Evaluation, feeds and the numbers of an epoch, against the slow and obvious way."""

from __future__ import annotations

import io
import itertools
import math
import warnings

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier.data import Stream
from espalier.data.load import digits
from espalier.search.distribution import Distribution
from espalier.train import deterministic, evaluate, stochastic
from espalier.train.feed import Batches, Tensors, read
from espalier.train.progress import Bar, Lines
from espalier.train.result import Thinned
from espalier.train.scoring import wrong

(X, Y), TEST = networks.digit_vectors(300)


def test_the_score_is_the_mean_over_examples_whatever_the_batches() -> None:
    model = networks.mlp()
    outputs = model(X).detach()
    loss, error = float(F.cross_entropy(outputs, Y)), float((outputs.argmax(1) != Y).double().mean())
    for data in ((X, Y), [(X[:7], Y[:7]), (X[7:250], Y[7:250]), (X[250:], Y[250:])]):
        score = evaluate(model, data, loss=F.cross_entropy, batch_size=64)
        assert score.loss == pytest.approx(loss, rel=1e-5)
        assert score.error == pytest.approx(error)
        assert score.examples == 300


def test_evaluation_is_in_eval_mode_and_leaves_the_modes_as_they_were() -> None:
    model = networks.mixed_network().train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = evaluate(model, (X, Y), loss=F.cross_entropy)
    assert evaluate(model, (X, Y), loss=F.cross_entropy) == first  # no dropout
    assert [m.training for m in model] == [True, False, True, True, True, True, True]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def test_a_dataset_is_evaluated_on_its_test_part() -> None:
    data = digits().flatten()
    score = evaluate(networks.mlp(), data, loss=F.cross_entropy)
    assert score == evaluate(networks.mlp(), data.as_floats().test, loss=F.cross_entropy)


class Bypassed(nn.Module):
    """Two layers in a row, and one beside them: with the second closed the first is dead."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.beside = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(64, 8)
        self.last, self.other = nn.Linear(8, 10), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        deep = self.second(self.first(x).relu()).relu()
        return self.last(deep) + self.other(self.beside(x).relu())


def test_deterministic_is_under_the_canonical_mask() -> None:
    model = Bypassed()
    gated = espalier.attach(model, X[:4])
    mask = torch.ones(gated.d)
    mask[gated.space.slices["second"]] = 0
    assert gated.canonical(mask).sum() == 8
    small = gated.compact(mask)
    found = deterministic(gated, mask, (X, Y), loss=F.cross_entropy)
    told = evaluate(small, (X, Y), loss=F.cross_entropy)
    assert found.error == told.error
    assert found.loss == pytest.approx(told.loss, rel=1e-6)
    assert deterministic(gated, torch.ones(gated.d), (X, Y), loss=F.cross_entropy) == evaluate(
        model, (X, Y), loss=F.cross_entropy
    )


def test_stochastic_averages_the_predictions_of_drawn_structures() -> None:
    """Three gates: all eight structures, weighted by their probability, are what many draws come near to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 10))
    gated = espalier.attach(model, X[:4])
    theta = torch.tensor([0.9, 0.3, 0.6], dtype=torch.float64)
    exact = torch.zeros(300, 10)
    for bits in itertools.product((0.0, 1.0), repeat=3):
        mask = torch.tensor(bits)
        chance = float(torch.where(mask > 0, theta, 1 - theta).prod())
        with gated.masked(mask), torch.no_grad():
            exact += chance * model(X).softmax(1)
    score = stochastic(gated, theta, (X, Y), loss=F.cross_entropy, structures=2000)
    assert score.loss == pytest.approx(float(F.nll_loss(exact.log(), Y)), rel=2e-3)
    one = stochastic(gated, theta, (X, Y), loss=F.cross_entropy, structures=1, seed=4)
    assert one == stochastic(gated, theta, (X, Y), loss=F.cross_entropy, structures=1, seed=4)
    with pytest.raises(espalier.BadInput, match="structures is at least 1"):
        stochastic(gated, theta, (X, Y), loss=F.cross_entropy, structures=0)


def test_stochastic_at_a_decided_theta_is_deterministic() -> None:
    gated = espalier.attach(networks.mlp(), X[:4])
    mask = (torch.arange(gated.d) % 2).float()
    drawn = stochastic(gated, mask.double(), (X, Y), loss=F.cross_entropy, structures=3)
    sure = deterministic(gated, mask, (X, Y), loss=F.cross_entropy)
    assert drawn.error == sure.error
    assert drawn.loss == pytest.approx(sure.loss, rel=1e-5)


def test_stochastic_averages_outputs_where_there_are_no_classes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 1))
    gated = espalier.attach(model, X[:4])
    theta = torch.full((4,), 0.5, dtype=torch.float64)
    target = Y.float().unsqueeze(1)
    score = stochastic(gated, theta, (X, target), loss=F.mse_loss, structures=50, seed=1)
    noise = torch.rand(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    masks = Distribution(gated.space, 0.0, torch.device("cpu")).draw(theta, noise)
    total = torch.zeros(300, 1)
    for mask in masks:
        with gated.masked(mask), torch.no_grad():
            total += model(X)
    assert score.error is None
    assert score.loss == pytest.approx(float(F.mse_loss(total / 50, target)), rel=1e-5)


def test_what_counts_as_a_wrong_class() -> None:
    logits = torch.eye(3)[[0, 1, 2, 2]]
    assert [int(n) for n in wrong(logits, torch.tensor([0, 1, 1, 2]))] == [1, 4]
    assert [int(n) for n in wrong(logits, torch.tensor([0, 1, 1, -100]))] == [1, 3]  # not predicted
    dense = logits.T[None]  # (1, classes, positions)
    assert [int(n) for n in wrong(dense, torch.tensor([[0, 1, 1, 2]]))] == [1, 4]
    assert [int(n) for n in wrong(logits[None], torch.tensor([[0, 1, 1, 2]]))] == [1, 4]  # (1, positions, classes)
    assert wrong(torch.zeros(2, 3, 3), torch.zeros(2, 3, dtype=torch.int64)) is None  # either dimension could be it
    assert wrong(torch.zeros(2, 3, 5), torch.zeros(2, 7, dtype=torch.int64)) is None  # neither can
    assert wrong(logits[:, :1], torch.tensor([0, 1, 1, 0])) is None  # one logit
    assert wrong(logits[0], torch.tensor(0)) is None
    assert wrong(logits, torch.rand(4, 3)) is None
    assert wrong(logits, torch.tensor([0.0, 1.0, 1.0, 2.0])) is None
    assert wrong({"logits": logits}, torch.tensor([0, 1, 1, 2])) is None


def test_entropy_of_bits_and_choices() -> None:
    space = espalier.Space([espalier.Bits("a", 2), espalier.Choice("b", 4)])
    theta = torch.tensor([0.5, 0.0, 0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    assert espalier.Search(space, initial=theta, margin=0.0).entropy() == pytest.approx((1 + 0 + 2) / 3)
    bits = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert espalier.Search(1, initial=0.25).entropy() == pytest.approx(bits)


def test_theta_over_time_is_thinned_evenly_and_resumed() -> None:
    whole, parts = Thinned(8), Thinned(8)
    for update in range(100):
        whole.offer(update, torch.full((1, 2), float(update)))
        if update % 7 == 0:
            state, parts = parts.state_dict(), Thinned(8)
            parts.load_state_dict(state)
        parts.offer(update, torch.full((1, 2), float(update)))
    assert whole.updates == [0, 16, 32, 48, 64, 80, 96]
    assert whole.table(0)["theta"][:, 0].tolist() == whole.table(0)["updates"].tolist() == whole.updates
    assert parts.updates == whole.updates
    assert parts.table(0)["theta"].equal(whole.table(0)["theta"])


def test_tensors_are_read_in_the_same_order_wherever_one_starts() -> None:
    feed = Tensors(X, Y, 32, seed=3)
    assert feed.updates == 9

    def labels(start: int, stop: int) -> list[list[int]]:
        return [y.tolist() for _, y in Tensors(X, Y, 32, seed=3).epoch(start, stop, range(3, 12), 2)]

    whole = labels(0, 18)
    assert [len(y) for y in whole] == [64] * 3 + [32] * 9 + [64] * 6
    for start in (1, 2, 3, 7, 11, 12, 15):
        assert labels(start, 18) == whole[start:]
    order = Stream(3, len(X)).take(1, 288)[0]
    assert list(itertools.chain(*whole[:6])) == Y[order].tolist()  # one after another, however many at once
    assert Tensors(X, Y, 300, seed=3).updates == 1


def test_a_settled_update_of_few_examples_reads_them_all() -> None:
    batches = list(Tensors(X[:50], Y[:50], 32, seed=0).epoch(0, 2, range(0), 4))
    assert [len(y) for _, y in batches] == [50, 50]
    few = list(Batches([(X[:5], Y[:5]), (X[5:9], Y[5:9])]).epoch(0, 2, range(0), 4))
    assert [len(y) for _, y in few] == [9, 9]


def test_a_rest_of_batches_is_not_filled_up_from_the_next_pass() -> None:
    batches = [(X[i : i + 4], torch.full((4,), i)) for i in range(0, 20, 4)]  # five
    read_back = [sorted(set(y.tolist())) for _, y in Batches(batches).epoch(0, 5, range(0), 2)]
    assert read_back == [[0, 4], [8, 12], [0, 4], [8, 12], [0, 4]]


def test_looking_at_a_loader_leaves_random_numbers_alone() -> None:
    feed = read(networks.loader((X, Y), 32), 64, 0)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    assert len(feed.example()) == 4
    assert sum(len(y) for _, y in feed.once()) == 288
    assert sum(len(y) for _, y in feed.once(40)) == 64
    assert torch.rand(2).equal(expected)


def test_lines_of_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch of an hour is told of while it lasts; a run of a day is not told of every ten seconds."""
    now = 0.0
    monkeypatch.setattr("espalier.train.progress.time.monotonic", lambda: now)
    log = io.StringIO()
    lines = Lines(log)
    lines.start(0, 86_400)
    for update in range(1, 86_401):
        now += 1.0
        lines.update(update)
        if update % 3600 == 0:
            lines.epoch(f"epoch {update // 3600}")
    told = log.getvalue().splitlines()
    assert told[0] == "  0%  update 10 of 86,400  23 h 59 min left"
    assert any(line.startswith("  4%  epoch 1 ") for line in told)
    assert told[-1] == "100%  epoch 24  0 s left"
    assert 150 < len(told) < 400


@pytest.mark.parametrize("width", [80, 140])
def test_the_numbers_of_an_epoch_fit_on_a_terminal(width: int) -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=width, force_terminal=True)
    bar = Bar(console)
    bar.start(0, 100)
    bar.update(40)
    bar.epoch("epoch 3  loss 1.0021  error 33.33%  validation if cut now 14.89%  share 29.94%")
    bar.stop()
    shown = console.file.getvalue()
    assert all(part in shown for part in ("40%", "left", "epoch 3", "loss 1.0021", "14.89%", "share 29.94%"))
    assert ("━━" in shown) == (width == 140)


def test_on_a_narrow_terminal_the_percent_and_the_time_left_stay_whole() -> None:
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), width=80, force_terminal=True, color_system=None
    )
    bar = Bar(console)
    bar.start(0, 100)
    bar.update(100)
    bar.epoch("epoch 140  loss 0.0069  error 10.00%  validation 11.78%  share 29.79%  settled")
    bar.stop()
    assert "100% 0 s left" in console.file.getvalue().splitlines()[-2]


def test_a_score_knows_what_a_constant_answer_would_get() -> None:
    """The most frequent class; the mean under a square; the share as a probability under binary cross entropy."""
    labels = torch.tensor([2, 2, 2, 0, 1, 2, 0])
    score = evaluate(networks.mlp(), (X[:7], labels), loss=F.cross_entropy, batch_size=3)
    assert score.guess == pytest.approx(3 / 7)
    numbers = torch.linspace(-1, 3, 300)[:, None]
    model = nn.Linear(64, 1)
    assert evaluate(model, (X, numbers), loss=F.mse_loss, batch_size=70).guess == pytest.approx(
        float(numbers.var(correction=0))
    )
    bits = (torch.arange(300) % 4 == 0).float()[:, None]
    entropy_of_a_quarter = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    guess = evaluate(model, (X, bits), loss=F.binary_cross_entropy_with_logits).guess
    assert guess == pytest.approx(entropy_of_a_quarter, rel=1e-5)


def test_what_has_not_learned_says_so() -> None:
    """A network that learned the opposite of what it is judged by; one that learned what it should says nothing."""
    labels = torch.arange(300) % 3 // 2  # two thirds are of class 0
    inputs = F.one_hot(labels, 8).float()
    about = {"loss": F.cross_entropy, "epochs": 20, "target": 0.5, "quiet": True}

    def trained(judged: Tensor) -> espalier.train.Result:
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        return espalier.fit(model, (inputs, labels), validation=(inputs, judged), **about)

    words = r"error of 100\.00% .* most frequent class, 33\.33%; use a larger target than 50\.00%, or train longer"
    with pytest.warns(UserWarning, match=words):
        result = trained(1 - labels)
    assert result.warning == result.summary()["warning"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = trained(labels)
    assert result.validation_error == 0
    assert "warning" not in result.summary()
