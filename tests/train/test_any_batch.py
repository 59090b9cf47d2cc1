"""Data as people have them: arrays, tables, torch Datasets, loaders of dicts, several inputs, targets, own losses."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import networks
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import espalier
from espalier import BadInput, attach, fit, shape, sweep
from espalier.data import from_arrays
from espalier.train import evaluate, feed

X, Y = networks.digit_vectors(256)[0]


def short(model: nn.Module, data: Any, **settings: Any) -> Any:
    return fit(model, data, **{"epochs": 2, "batch_size": 32, "target": 0.5, "quiet": True} | settings)


def test_arrays_and_tables_are_read_as_tensors_are() -> None:
    expected = short(networks.mlp(), (X, Y))
    read_only = Y.numpy().copy()
    read_only.setflags(write=False)  # as arrays of pandas 3 are
    given: list[Any] = [(X.numpy().astype(np.float64), read_only), {"input": X, "labels": Y}]
    with suppress(ImportError):
        pandas = importlib.import_module("pandas")
        given.append((pandas.DataFrame(X.numpy()), pandas.Series(Y.numpy())))
    for data in given:
        result = short(networks.mlp(), data, validation=data)
        assert result.theta.equal(expected.theta)
        assert result.validation == evaluate(expected.model, (X, Y), loss=F.cross_entropy)


def test_a_few_examples_to_judge_by_may_be_fewer_than_a_batch() -> None:
    few = {"input": X[:10], "labels": Y[:10]}
    result = short(networks.mlp(), {"input": X, "labels": Y}, validation=few)
    expected = evaluate(result.model, (X[:10], Y[:10]), loss=F.cross_entropy)
    assert result.validation == expected == evaluate(result.model, few, loss=F.cross_entropy)


def test_a_torch_dataset_is_put_into_a_loader() -> None:
    result = short(networks.mlp(), TensorDataset(X, Y), validation=TensorDataset(X, Y))
    assert result.updates == 16
    assert result.validation.examples == 256

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(zip(X, Y))

    assert short(networks.mlp(), Stream()).updates == 16


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(32, 12), nn.Linear(32, 12), nn.Linear(12, 10)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(a) + self.second(b)))


def test_all_but_the_last_of_a_tuple_are_inputs() -> None:
    a, b = X.chunk(2, 1)
    expected = short(TwoInputs(), DataLoader(TensorDataset(a, b, Y), 32), seed=1)
    pairs = [((p.clone(), q.clone()), y) for p, q, y in zip(a.split(32), b.split(32), Y.split(32))]
    again = short(TwoInputs(), pairs, seed=1)
    assert again.theta.equal(expected.theta)
    adapted = short(
        TwoInputs(), [{"left": p, "right": q, "y": y} for (p, q), y in pairs], seed=1,
        batch=lambda item: ((item["left"], item["right"]), item["y"]),
    )  # fmt: skip
    assert adapted.theta.equal(expected.theta)


class OwnLoss(nn.Module):
    """As models of Transformers: labels among the arguments, the loss among the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = networks.mlp()

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(pixels)
        return {"logits": logits} | ({} if labels is None else {"loss": F.cross_entropy(logits, labels)})


@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_s_own_loss(loaded: bool) -> None:
    expected = short(networks.mlp(), [(x, y) for x, y in zip(X.split(32), Y.split(32))] if loaded else (X, Y))
    batches = [{"pixels": x, "labels": y} for x, y in zip(X.split(32), Y.split(32))]
    data = batches if loaded else {"pixels": X, "labels": Y}
    result = short(OwnLoss(), data, loss=None, validation=data)  # such a loss has one mask at a time
    torch.testing.assert_close(result.theta, expected.theta, rtol=1e-4, atol=1e-4)
    assert result.validation.loss < 2.3
    given = short(OwnLoss(), data, loss=lambda outputs, labels: F.cross_entropy(outputs["logits"], labels))
    torch.testing.assert_close(given.theta, expected.theta, rtol=1e-4, atol=1e-4)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.digit, self.mean = nn.Linear(64, 24), nn.Linear(24, 10), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.body(x))
        return self.digit(x), self.mean(x)


def test_several_targets() -> None:
    both = (Y, X.mean(1, keepdim=True))

    def loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(outputs[0], targets[0]) + F.mse_loss(outputs[1], targets[1])

    first = short(TwoHeads(), (X, both), loss=loss, validation=(X, both))
    assert first.history[-1]["validation_loss"] < first.history[0]["loss"]
    assert first.history[-1]["error"] is None


class TwoOfEach(nn.Module):
    """Two inputs, the left and the right half of a row, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoHeads()

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(torch.cat([a, b], 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_inputs_with_several_targets_are_one_data_set(kind: Any) -> None:
    a, b, both = *X.chunk(2, 1), (Y, X.mean(1, keepdim=True))
    expected = short(TwoHeads(), (X, both), loss=both_losses, seed=1, validation=(X, both))
    data = (kind([a, b]), kind(both))
    result = short(TwoOfEach(), data, loss=both_losses, seed=1, validation=data)
    assert result.updates == expected.updates == 16
    assert result.validation.loss == pytest.approx(expected.validation.loss)
    arrays = tuple(tuple(one.numpy() for one in part) for part in data)
    assert short(TwoOfEach(), arrays, loss=both_losses, seed=1).theta.equal(result.theta)
    swept = together(TwoOfEach, data, loss=both_losses, epochs=1)
    assert [one.validation.examples for one in swept] == [256, 256]
    held = short(TwoOfEach(), data, loss=both_losses, validation=0.25)
    assert (held.updates, held.validation.examples) == (12, 64)


def test_two_batches_stay_two_batches() -> None:
    parts = [(X[:96], Y[:96]), (X[96:128], Y[96:128])]
    listed = [(X[:64], Y[:64]), (X[64:128], Y[64:128])]
    for batches in (tuple(parts), listed, tuple(listed)):
        assert feed.read(batches, 32, 0).updates == 2
    (inputs, targets), _ = feed.read(tuple(parts), 32, 0).once()
    assert inputs.equal(X[:96])
    assert targets.equal(Y[:96])


def together(factory: Any, data: Any, **settings: Any) -> Any:
    usual: dict[str, Any] = {"epochs": 2, "batch_size": 32, "targets": [0.5, 0.7], "quiet": True, "validation": data}
    return sweep(factory, data, **usual | settings)


def test_a_sweep_reads_what_fit_reads() -> None:
    """Arrays, tables, datasets, loaders and dicts are the tensors that they hold."""
    expected = together(networks.mlp, (X, Y), epochs=1)

    class Table:
        """As pandas has them."""

        def __init__(self, values: Tensor) -> None:
            self.values = values

        def to_numpy(self) -> np.ndarray[Any, Any]:
            return self.values.numpy()

    for data in (
        (X.numpy().astype(np.float64), Y.numpy()),
        (Table(X), Table(Y)),
        {"input": X, "labels": Y},
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), 48),
        [{"input": x, "labels": y} for x, y in zip(X.split(60), Y.split(60))],
    ):
        for ours, theirs in zip(together(networks.mlp, data, epochs=1), expected, strict=True):
            assert ours.theta.equal(theirs.theta)
            assert ours.validation == theirs.validation
    adapted = together(networks.mlp, [(Y, X)], epochs=1, batch=lambda item: (item[1], item[0]))
    assert adapted[1].theta.equal(expected[1].theta)


def both_losses(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(outputs[0], targets[0]) + F.mse_loss(outputs[1], targets[1])


@pytest.mark.parametrize("recipe", ["default", "ranked"])
@pytest.mark.parametrize("form", ["several inputs", "several targets", "own loss"])
def test_a_sweep_of_other_forms(form: str, recipe: str) -> None:
    """The small network's own score is what the sweep says of it."""
    a, b = X.chunk(2, 1)
    forms: dict[str, Any] = {
        "several inputs": (TwoInputs, ((a, b), Y), F.cross_entropy),
        "several targets": (TwoHeads, (X, (Y, X.mean(1, keepdim=True))), both_losses),
        "own loss": (OwnLoss, {"pixels": X, "labels": Y}, None),
    }
    factory, data, loss = forms[form]

    def own(model: nn.Module) -> Tensor:
        if form == "own loss":
            return model(X, Y)["loss"]
        return loss(model(a, b), Y) if form == "several inputs" else loss(model(X), data[1])

    for result in together(factory, data, loss=loss, recipe=recipe, epochs=6):
        with torch.no_grad():
            assert result.validation.loss == pytest.approx(float(own(result.model)), rel=1e-5)
        assert result.history[-1]["loss"] < result.history[0]["loss"]
        assert result.share_after <= result.target


class Tagger(nn.Module):
    """A class for each position of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(12, 16), nn.Conv1d(16, 24, 3, padding=1), nn.Linear(24, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.mix(self.embed(ids).transpose(1, 2))).transpose(1, 2))


class Segmenter(nn.Module):
    """A logit for each pixel, through a smaller image and a bridge."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.down = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 12, 3, 2, 1)
        self.up, self.head = nn.ConvTranspose2d(12, 8, 2, 2), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.head(torch.cat([x, torch.relu(self.up(torch.relu(self.down(x))))], 1))


def tokens_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("way", ["fit", "sweep"])
@pytest.mark.parametrize("kind", ["sequence", "segmentation"])
def test_sequences_and_images_as_targets(way: str, kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    factory: Any
    if kind == "sequence":
        x = torch.randint(0, 12, (256, 10), generator=draw)
        factory, y, loss = Tagger, (x + x.roll(1, 1)) % 4, tokens_loss
        constant = float(np.log(4))
    else:
        x = torch.randn(192, 1, 8, 8, generator=draw)
        factory, y, loss = Segmenter, (F.avg_pool2d(x, 3, 1, 1) > 0).float(), F.binary_cross_entropy_with_logits
        constant = float(np.log(2))
    settings: dict[str, Any] = {"epochs": 12, "batch_size": 16, "loss": loss, "validation": (x, y), "quiet": True}
    if way == "fit":
        result = fit(factory(), (x, y), target=0.5, **settings)
    else:
        result = sweep(factory, (x, y), targets=[0.5, 0.8], **settings)[0]
    assert result.validation_loss < 0.85 * constant
    assert (result.validation_error is None) == (kind == "segmentation")


LOSSES = [
    (F.mse_loss, "number"), (F.smooth_l1_loss, "number"), (F.huber_loss, "number"), (F.l1_loss, "number"),
    (F.binary_cross_entropy_with_logits, "labels"), (F.binary_cross_entropy_with_logits, "number"),
]  # fmt: skip


# A sweep maps every loss over masks and runs; fit calls it.
@pytest.mark.parametrize(
    ("way", "recipe", "loss", "kind"),
    [
        *(("sweep", recipe, *pair) for recipe in ("default", "ranked") for pair in LOSSES),
        ("fit", "default", *LOSSES[0]),
        ("fit", "ranked", *LOSSES[4]),
    ],
)
def test_regression_binary_and_multi_label(way: str, recipe: str, loss: Any, kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=draw)
    y = x[:, :10] - x[:, 10:20]
    y = y[:, :1] if kind == "number" else y
    y = (y > 0).float() if loss is F.binary_cross_entropy_with_logits else y

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, y.shape[1]))

    settings: dict[str, Any] = {"epochs": 24, "batch_size": 32, "loss": loss, "recipe": recipe, "validation": (x, y)}
    if way == "fit":
        result = fit(network(), (x, y), target=0.5, quiet=True, **settings)
    else:
        result = sweep(network, (x, y), targets=[0.5, 0.8], quiet=True, **settings)[0]
    with torch.no_grad():
        constant = float(loss(torch.zeros_like(y), y))
    assert result.validation_loss < 0.8 * constant
    assert result.validation_error is None
    assert result.share_after <= 0.5


@pytest.mark.parametrize(
    ("data", "settings", "said"),
    [
        ([{"pixels": X[:8]}], {}, "holds its targets as 'labels'"),
        ([X[:8]], {}, "pairs"),
        ([(X[:8], Y[:8])], {"loss": None}, "loss=None is for batches that are dicts"),
        ([{"pixels": X[:8], "labels": Y[:8]}], {"loss": None, "model": TwoInputs()}, "does not take these inputs"),
        ([(X[:8], Y[:8])], {"batch": 3}, "batch is a function"),
        ([(X[:8], Y[:8])], {"batch": lambda item: item[0]}, "batch gives a tuple"),
        ((np.array([["a"] * 64] * 8), Y[:8]), {}, "arrays hold numbers"),
    ],
)
def test_what_cannot_be_read_is_named(data: Any, settings: dict[str, Any], said: str) -> None:
    given = {"model": networks.mlp()} | settings
    with pytest.raises(espalier.EspalierError, match=said):
        short(given.pop("model"), data, **given)


@pytest.mark.parametrize("form", ["tensors", "arrays", "dataset", "torch", "numbers", "two targets"])
def test_a_share_of_the_data_is_held_out(form: str) -> None:
    """Every example is in one of the two parts; classes are held out in proportion."""
    x, y = torch.arange(60.0).unsqueeze(1), torch.arange(60) % 3
    targets: Any = {"numbers": x / 60, "two targets": (y, x)}.get(form, y)
    data: Any = (x, targets)
    if form == "arrays":
        data = (x.numpy(), y.numpy())
    elif form == "dataset":
        data = from_arrays((x, y), (x[:2], y[:2]))
    elif form == "torch":
        data = torch.utils.data.TensorDataset(x, y)
    kept, held = feed.split_off(data, 0.25, seed=1)
    if form == "dataset":
        assert kept is held
        kept, held = kept.train, held.test
    read = [[part[i] for i in range(len(part))] for part in (kept, held)] if form == "torch" else [kept, held]
    first, second = ([pair[0] for pair in part] if form == "torch" else part[0].flatten() for part in read)
    assert sorted([*map(float, first), *map(float, second)]) == list(map(float, range(60)))
    assert len(second) == 15
    if form in ("tensors", "arrays", "dataset"):
        assert torch.as_tensor(held[1]).bincount().tolist() == [5, 5, 5]
    assert feed.split_off(data, None, seed=1) == (data, None)


def test_fit_and_sweep_hold_out_a_share_themselves() -> None:
    result = fit(networks.mlp(), (X, Y), epochs=1, target=0.5, validation=0.25, quiet=True)
    assert result.validation is not None
    assert result.validation.examples == len(X) // 4
    (swept,) = sweep(networks.mlp, (X, Y), targets=[0.5], epochs=1, validation=0.25, quiet=True)
    assert swept.validation is not None
    assert swept.validation.examples == len(X) // 4
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(BadInput, match="share of the data"):
            fit(networks.mlp(), (X, Y), epochs=1, validation=share, quiet=True)
    with pytest.raises(BadInput, match="come in batches"):
        fit(networks.mlp(), [(X, Y)], epochs=1, validation=0.1, quiet=True)


def test_fit_shape_and_sweep_take_what_attach_takes() -> None:
    whole, some = fit(networks.mlp(), (X, Y), epochs=1, quiet=True), {"kinds": ("units", "inputs"), "ignore": ("0",)}
    fitted = fit(networks.mlp(), (X, Y), epochs=1, quiet=True, **some)
    (swept,) = sweep(networks.mlp, (X, Y), penalties=[0.0], epochs=1, quiet=True, **some)
    shaping = shape(networks.mlp(), X[:4], updates=4, **some)
    names = list(shaping.gated.space.slices)
    assert list(fitted.space.slices) == list(swept.space.slices) == names
    assert "0" in whole.space.slices
    assert "0" not in names
    assert any("input" in name for name in names)
    gated = attach(networks.mlp(), X[:4])
    with pytest.raises(BadInput, match="give kinds, ignore to espalier"):
        fit(gated, (X, Y), epochs=1, quiet=True, **some)
    with pytest.raises(BadInput, match="give kinds, ignore to espalier"):
        shape(gated, updates=4, **some)
    with pytest.raises(BadInput, match="give kinds, ignore to espalier"):
        sweep(lambda: attach(networks.mlp(), X[:4]), (X, Y), penalties=[0.0], epochs=1, quiet=True, **some)


class Halves(NamedTuple):
    a: Tensor
    b: Tensor


def test_named_tuples_stay_what_they_are() -> None:
    """As inputs, as targets, and as what a model gives: the loss and the metrics read their fields."""

    class Both(TwoInputs):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            return Halves(super().forward(a, b), a[:, :1])

    def loss(outputs: Halves, targets: Halves) -> Tensor:
        return F.cross_entropy(outputs.a, targets.a) + 0 * (outputs.b - targets.b).mean()

    def right(outputs: Halves, targets: Halves) -> float:
        return float((outputs.a.argmax(1) == targets.a).float().mean())

    inputs, targets = Halves(X[:, :32], X[:, 32:]), Halves(Y, X[:, :1])
    assert short(TwoInputs(), (inputs, Y), validation=0.25).validation.examples == len(X) // 4
    rows = [(Halves(*pair), Halves(*both)) for pair, both in zip(zip(*inputs), zip(*targets))]
    loader = DataLoader(rows, 32)  # type: ignore[arg-type]
    result = short(Both(), loader, loss=loss, validation=loader, metrics={"right": right})
    assert result.updates == 16
    assert result.validation.metrics["right"] == pytest.approx(right(result.model(*inputs), targets))


class Lengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.hidden, self.head = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.table(x))))


def of_each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=255)


@pytest.mark.parametrize("settings", [{"target": 0.5}, {"target": 0.5, "samples": 2}, {"target": None, "penalty": 0.1}])
def test_batches_of_different_lengths(settings: dict[str, Any]) -> None:
    """As sequences that are padded batch by batch: where an update would read several at once, it reads one."""
    torch.manual_seed(0)
    batches = [(tokens, tokens) for tokens in (torch.randint(12, (6, length)) for length in (5, 7, 7, 4, 9))]
    result = short(Lengths(), batches, loss=of_each, validation=batches, epochs=4, **settings)
    assert result.updates == 20
    assert result.validation.examples == 30
    with pytest.raises(BadInput, match="whole validation at once, but its batches are of different shapes"):
        short(Lengths(), batches, loss=of_each, validation=batches, metrics=["accuracy"])


def test_images_of_different_sizes_have_no_constant_answer() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
    batches = [(torch.rand(2, 1, size, size),) * 2 for size in (5, 8, 6)]
    assert evaluate(model, batches, loss=F.mse_loss).guess is None


def test_targets_that_no_score_is_of_are_not_predicted() -> None:
    """The 255 of segmentation: neither wrong, nor a class that a constant answer would guess."""
    tokens = torch.arange(12).repeat(4, 2)  # (4, 24)
    targets = torch.where(torch.arange(24) < 16, 255, tokens)
    model = Lengths()
    kept = model(tokens)[:, 16:].argmax(-1) == tokens[:, 16:]
    score = evaluate(model, (tokens, targets), loss=of_each, metrics=["accuracy"])
    assert score.error == pytest.approx(1 - float(kept.float().mean()))
    assert score.metrics["accuracy"] == pytest.approx(float(kept.float().mean()))
    assert score.guess == pytest.approx(1 - 4 / 32)


def test_a_loss_without_a_value_for_constants_gives_no_guess() -> None:
    """Scaled by what is predicted, as a correlation is: of a constant it is not a number, and tells nothing of what was
    learned."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        scaled = (outputs - outputs.min()) / (outputs.max() - outputs.min())
        return (scaled - targets).square().mean()

    score = evaluate(nn.Linear(4, 1), (x, x[:, :1]), loss=loss)
    assert score.guess is None
    assert score.learned


def test_a_rest_of_one_row_under_batch_norm() -> None:
    """513 rows are read as 512 and one where statistics are estimated."""
    torch.manual_seed(0)
    x = torch.randn(513, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    data = x, (x[:, 0] > 0).long()
    result = short(model, data, validation=data)
    hidden = result.model[0](x[:512])
    assert torch.allclose(result.model[1].running_var, hidden.var(0))


def test_tuples_of_inputs_and_of_targets_are_no_two_batches() -> None:
    def loss(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, targets[0]) + 0 * targets[1].mean()

    inputs, targets = (X[:, :32], X[:, 32:]), (Y, X[:, 0])
    result = short(TwoInputs(), (inputs, targets), loss=loss, validation=(inputs, targets))
    assert result.updates == 2 * 256 // 32
    two = short(networks.mlp(), ((X[:32], Y[:32]), (X[32:64], Y[32:64])))  # of one length, and alike
    assert two.updates == 2 * 2
    assert short(networks.mlp(), ((X[:32], Y[:32]), (X[32:48], Y[32:48]))).updates == 2 * 2


def test_the_rest_of_a_torch_dataset_makes_no_batch_but_is_validated_on() -> None:
    """An epoch is examples // batch_size updates, as of tensors; BatchNorm takes no batch of one."""
    model = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    data = TensorDataset(X[:65], Y[:65])
    result = short(model, data, validation=data)
    assert result.updates == 2 * 65 // 32
    assert result.validation.examples == 65
    assert short(networks.mlp(), TensorDataset(X[:20], Y[:20])).updates == 2


def test_metrics_read_outputs_that_hold_more_than_tensors() -> None:
    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = networks.mlp()

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"scores": self.net(x), "cache": None, "depth": 2}

    def right(outputs: dict[str, Any], targets: Tensor) -> float:
        assert outputs["depth"] == 2
        return float((outputs["scores"].argmax(1) == targets).float().mean())

    parts = [(X[:100], Y[:100]), (X[100:], Y[100:])]
    about = {"loss": lambda outputs, targets: F.cross_entropy(outputs["scores"], targets)}
    result = short(Noted(), parts, validation=parts, metrics={"right": right}, **about)
    assert result.validation.metrics["right"] == pytest.approx(right(result.model(X), Y))


def test_parameters_of_a_loss_are_not_trained_in_silence() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return self.scale * F.cross_entropy(outputs, targets)

    with pytest.warns(UserWarning, match="loss has parameters of its own, which stay as they are"):
        short(networks.mlp(), (X, Y), loss=Weighed())
    short(networks.mlp(), (X, Y), loss=Weighed().requires_grad_(False))
    with pytest.raises(BadInput, match=r"not a dict of .: add the parts"):
        short(networks.mlp(), (X, Y), loss=lambda outputs, targets: {"loss": F.cross_entropy(outputs, targets)})


def test_a_sweep_leaves_out_what_is_no_class() -> None:
    """Its rows have the error of the score, whichever targets the loss leaves out."""
    torch.manual_seed(0)
    tokens = torch.randint(12, (64, 9))
    for left_out in (-100, 255):
        targets = torch.where(torch.arange(9) < 6, left_out, tokens)
        data = tokens, targets

        def loss(outputs: Tensor, targets: Tensor, left_out: int = left_out) -> Tensor:
            return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=left_out)

        (result,) = sweep(
            Lengths, data, loss=loss, targets=[0.6], epochs=12, batch_size=16, validation=data, quiet=True
        )
        assert result.validation is not None
        assert result.validation.error < 0.6
        assert result.history[-1]["validation_error"] == pytest.approx(result.validation.error, abs=1e-6)
        assert result.history[-1]["error"] < 0.7


def test_what_makes_batches_of_a_loader_is_given_pairs_to_validate_on_too() -> None:
    """A pair was read as two batches; a dict in memory of which a part was held out, as well."""
    loader = DataLoader(TensorDataset(X, Y), 32)
    for validation in ((X[:50], Y[:50]), DataLoader(TensorDataset(X[:50], Y[:50]), 50)):
        mirrored = short(
            nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 64)), loader, validation=validation,
            batch=lambda item: (item[0], item[0]), loss=F.mse_loss,
        )  # fmt: skip
        assert mirrored.validation.examples == 50
        assert mirrored.validation == evaluate(mirrored.model, (X[:50], X[:50]), loss=F.mse_loss)
    with pytest.raises(BadInput, match="batch= is for what a loader gives"):
        short(networks.mlp(), (X, Y), batch=lambda item: item)
    with pytest.raises(BadInput, match=r"fails on these: AttributeError: .*no attribute 'x'; give a loader"):
        short(
            networks.mlp(),
            loader,
            validation=(X, Y),
            batch=lambda item: (item[0], item[1]) if len(item[1]) == 32 else item.x,
        )
    held_out = short(OwnLoss(), {"pixels": X, "labels": Y}, loss=None, validation=0.25)
    assert held_out.validation.examples == 64


def test_a_stream_without_end_needs_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                yield X[:32], Y[:32]

        def __len__(self) -> int:
            return 3

    norm = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
    result = short(norm, Endless(), validation=Endless())
    assert (result.updates, result.validation.examples) == (6, 96)
    monkeypatch.setattr(feed, "PATIENCE", -1.0)
    with pytest.warns(UserWarning, match="1 batches counted of data without a length, which may have no end"):
        assert short(networks.mlp(), Unsized()).updates == 6


class Unsized:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(X[:32], Y[:32])] * 3)


class Nodes(nn.Module):
    """Two layers on one graph, which is given as edges ``(2, E)`` or as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        def neighbours(h: Tensor) -> Tensor:
            return edges @ h if edges.is_floating_point() else torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])

        return self.last(neighbours(F.relu(self.first(neighbours(x)))))


@pytest.mark.parametrize("matrix", [False, True])
def test_one_graph_is_one_batch_on_every_road(matrix: bool) -> None:
    x, y = torch.randn(20, 6), torch.arange(20) % 3
    link = ((y == y[:, None]) & (torch.rand(20, 20) < 0.5)).float() + torch.eye(20)
    edges, known = link if matrix else link.nonzero().T, torch.arange(20) < 15
    data = [((x, edges), torch.where(known, y, -100))]
    result = fit(Nodes(), data, epochs=20, target=0.5, validation=[((x, edges), y)], quiet=True)
    assert (result.updates, result.validation.examples) == (20, 20)
    assert result.share_after <= 0.5
    model = Nodes()
    shaping = shape(model, (x, edges), target=0.5, updates=20)

    def closure(x: Tensor, edges: Tensor, y: Tensor, named: list[str]) -> Tensor:
        loss = F.cross_entropy(shaping.network(x, edges)[known], y[known])
        loss.backward()
        return loss

    for _ in range(20):
        shaping.step(closure, x, edges, y, ["what is handed on", "may be anything"])
    assert shaping.finish(data).share_after <= 0.5


@pytest.mark.parametrize("nodes", [20, 100])  # a run keeps 64 examples beside what ships; a graph is kept whole
def test_a_run_on_one_graph_is_kept_and_ships(nodes: int, tmp_path: Path) -> None:
    x, y = torch.randn(nodes, 6), torch.arange(nodes) % 3
    edges = torch.stack([torch.arange(nodes), torch.arange(nodes).flip(0)])
    data = [((x, edges), y)]
    result = fit(Nodes(), data, epochs=8, target=0.5, quiet=True, checkpoint=tmp_path / "run")
    assert all(map(torch.equal, result.examples, (x, edges)))
    shipped = espalier.ship(tmp_path / "run", tmp_path / "small", model=Nodes)
    assert shipped.checks == {"examples": 1, "difference": 0.0}
    assert set(shipped.speed) == {1}
    assert espalier.load(tmp_path / "small", Nodes).eval()(x, edges).equal(result.model(x, edges))
    with pytest.raises(espalier.EspalierError, match="for a batch of any size, and these inputs are one example"):
        espalier.ship(result, tmp_path / "file", formats=["python"])


@pytest.mark.parametrize("sparse", [False, True])
def test_a_graph_as_a_matrix_is_kept_whole(sparse: bool, tmp_path: Path) -> None:
    x, y, links = torch.randn(100, 6), torch.arange(100) % 3, torch.eye(100).flip(0)
    data = [((x, links.to_sparse() if sparse else links), y)]
    if sparse:  # gates are found by a dense one
        with pytest.raises(espalier.EspalierError, match=r"use \.to_dense\(\)"):
            fit(Nodes(), data, epochs=8, target=0.5, quiet=True)
        result = shape(Nodes(), (x, links), target=0.5, updates=8).finish(data, finished=False)
    else:
        result = fit(Nodes(), data, epochs=8, target=0.5, quiet=True, checkpoint=tmp_path)
    torch.testing.assert_close(result.model(*result.examples), result.model(x, links))


def test_images_in_a_list_with_their_boxes_are_a_batch() -> None:
    class Detector(nn.Module):
        """Losses in train mode, answers in eval mode."""

        def __init__(self) -> None:
            super().__init__()
            self.body = networks.mlp()

        def forward(self, images: list[Tensor], boxes: list[dict[str, Tensor]]) -> Any:
            out = self.body(torch.stack(images))
            wanted = torch.stack([box["label"] for box in boxes])
            return {"label": F.cross_entropy(out, wanted)} if self.training else out.unbind()

    loader = DataLoader(list(zip(X, Y)), 32, collate_fn=lambda pairs: tuple(zip(*pairs)))
    result = short(
        Detector(), loader, target=0.5, loss=lambda losses, _: sum(losses.values()),
        batch=lambda item: ((list(item[0]), [{"label": y} for y in item[1]]), torch.zeros(len(item[0]))),
    )  # fmt: skip
    assert result.history[1]["loss"] < result.history[0]["loss"]
    assert result.share_after <= 0.5
