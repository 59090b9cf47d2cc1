"""What fit refuses, and what it says: the thing, the value, the way out. Nothing saved before is lost."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
from pathlib import Path

import networks
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier import fit
from espalier.data import Dataset
from espalier.space import BadInput, BadType
from espalier.train import NotSaved, OutOfMemory, Recipe, fingerprint
from espalier.train.checkpoint import Checkpoint
from espalier.train.loop import Stop

X, Y = networks.digit_vectors(128)[0]
CLASSES, ZERO = tuple("0123456789"), torch.zeros(1, dtype=torch.float64)


def one_pixel(inputs: Tensor) -> Tensor:
    """The same inputs but for one number, of an example between those that are easily looked at."""
    changed = inputs.clone()
    changed[71, 3] += 1e-6
    return changed


def short(model: object = None, data: object = (X, Y), **settings):
    settings = {"loss": F.cross_entropy, "epochs": 2, "batch_size": 32, "quiet": True} | settings
    return fit(networks.mlp() if model is None else model, data, **settings)


class Empty:
    def __len__(self) -> int:
        return 3

    def __iter__(self):
        return iter(())


REFUSED = {
    "empty tensors": ({"data": (X[:0], Y[:0])}, "the data are empty"),
    "empty list": ({"data": []}, "the data are empty"),
    "an iterable that gives nothing": ({"data": Empty()}, "the data are empty"),
    "fewer targets": ({"data": (X, Y[:5])}, "128 inputs, but 5 targets"),
    "inputs of two lengths": ({"data": ((X, X[:5]), Y)}, r"different numbers of examples: \[5, 128\]"),
    "an iterator": ({"data": iter([(X, Y)])}, "only once; give a DataLoader"),
    "no data": ({"data": 7}, "an iterable of such pairs, not int"),
    "not pairs": ({"data": [X, X]}, r"pairs \(inputs, targets\), or dicts with 'labels', not Tensor"),
    "a batch larger than the data": ({"batch_size": 200}, "batch_size=200 is larger than the data, 128"),
    "a batch of nothing": ({"batch_size": 0}, "batch_size is at least 1, not 0"),
    "no epochs": ({"epochs": 0}, "epochs is at least 1, not 0"),
    "half an epoch": ({"epochs": 0.5}, "epochs is an integer, not 0.5"),
    "one mask": ({"samples": 1}, "samples is at least 2, not 1"),
    "a loss for each example": (
        {"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")},
        r"torch.float32 of shape \(32,\); take its mean",
    ),
    "a loss that is a number": ({"loss": lambda o, t: 3}, "scalar tensor, not int"),
    "both": ({"penalty": 0.1, "target": 0.5}, "exclude each other"),
    "a target of nothing": ({"target": 0.0}, r"share of the full cost in \(0, 1\], not 0"),
    "a cost nobody knows": ({"cost": "seconds"}, "seconds"),
    "a preset nobody knows": ({"recipe": "papr"}, "did you mean 'paper'"),
    "a preset of another kind": ({"recipe": 3}, "a name or an espalier"),
    "settled from the start": ({"settle": 1.0}, r"settle is a share of the run in \[0, 1\), not 1.0"),
    "settled before the ramp ends": (
        {"recipe": Recipe(begin=0.0, ramp=0.3, settle=0.9), "target": 0.5},
        "use settle of at most 0.7",
    ),
    "a seed below 0": ({"seed": -1}, "seed is at least 0"),
    "no time": ({"time_limit": 0}, "time_limit is a positive number"),
    "no model": ({"model": "resnet"}, "a torch module or what espalier.attach gave, not str"),
    "a model without parameters": ({"model": nn.Identity()}, "no parameters"),
    "an optimizer of another network": (
        {"optimizer": torch.optim.SGD(networks.mlp().parameters())},
        "that are not the model's",
    ),
    "an optimizer of another model": (
        {"optimizer": lambda p: torch.optim.SGD(networks.mlp().parameters(), lr=0.1)},
        "6 of 6 parameters that are not the model's",
    ),
    "no optimizer": ({"optimizer": lambda p: None}, "gives a torch.optim.Optimizer, not NoneType"),
    "a device nobody knows": ({"device": "gpu"}, "device 'gpu' is not known to torch; use 'cpu'"),
    "a device that is no name": ({"device": 3}, "device is a torch.device or its name"),
    "a device that is not there": ({"device": "cuda:99"}, "device 'cuda:99': torch sees"),
    "a scheduler that is a number": ({"scheduler": 3}, "scheduler is a function that is given the optimizer"),
    "no scheduler": ({"scheduler": lambda o: o}, "gives a torch scheduler.*not SGD"),
    "no loss": ({"loss": None}, "loss=None is for batches that are dicts"),
    "a number as loss": ({"loss": 3}, "loss is a function of .*such as F.cross_entropy, not 3"),
    "a loss by name": ({"loss": "ce"}, "loss is a function"),
    "a class of losses": ({"loss": nn.CrossEntropyLoss}, r"CrossEntropyLoss is a class: give CrossEntropyLoss\(\)"),
    "a loss without a graph": ({"loss": lambda o, t: F.cross_entropy(o, t).detach()}, "the loss has no gradient"),
    "a loss that is a float": ({"loss": lambda o, t: F.cross_entropy(o, t).item()}, "not float: .*without .item()"),
    "frozen": ({"model": networks.mlp().requires_grad_(False)}, "every parameter of the model is frozen"),
    "inputs of another width": (
        {"data": (X[:, :60], Y)},
        r"the model does not take these inputs, float32 \(4, 60\): mat1 and mat2",
    ),
    "inputs of another precision": (
        {"data": (X.double(), Y)},
        r"computes in torch.float32, the inputs are torch.float64: use x.to\(torch.float32\)",
    ),
    "arrays of text": ({"data": (np.array([["a"] * 64]), Y.numpy()[:1])}, "arrays hold numbers"),
    "lists": ({"data": ([[0.0] * 64], [1])}, r"pairs \(inputs, targets\), .* not list; one pair of tensors is a tuple"),
    "lists of examples": ({"data": (list(X), list(Y))}, r"these inputs, float32 \(4,\), .* and 123 more: "),
    "a set among targets": (
        {"data": [(X, (Y, {0.5}))], "loss": lambda o, t: F.cross_entropy(o, t[0])},
        "not set; leave it out, or make it a tensor with examples first",
    ),
    "None in memory": ({"data": ({"x": X, "mask": None}, Y)}, "not NoneType; leave it out"),
    "empty validation": ({"validation": (X[:0], Y[:0])}, "the data are empty"),
}


@pytest.mark.parametrize(("settings", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(settings: dict[str, object], says: str, tmp_path: Path) -> None:
    with pytest.raises(espalier.BadInput, match=says):
        short(**settings, checkpoint=tmp_path)
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"settle": 2.0}, "finite|share"),
        ({"theta_rate": float("nan")}, "theta_rate of a recipe is a finite number"),
        ({"drops": (1.5,)}, r"drops of a recipe are shares"),
    ],
)
def test_a_recipe_that_cannot_be_cooked(settings: dict[str, object], says: str) -> None:
    with pytest.raises(espalier.BadInput, match=says):
        short(recipe=Recipe(**settings))


def test_an_unreachable_target_is_named() -> None:
    gated = espalier.attach(networks.resnet(4), torch.randn(2, 1, 8, 8))
    smallest = 1 / 10_000
    with pytest.raises(espalier.Unreachable, match="smallest reachable share"):
        fit(gated, (X.reshape(-1, 1, 8, 8), Y), loss=F.cross_entropy, epochs=1, target=smallest, quiet=True)


@pytest.mark.parametrize(("folder", "says"), [("", "not ''; use '.'"), (3, "the path of a folder, not 3")])
def test_a_checkpoint_that_is_no_folder(folder: object, says: str) -> None:
    with pytest.raises(espalier.BadInput, match=says):
        short(checkpoint=folder)


@pytest.mark.parametrize("name", ["settings.json", "metrics.jsonl", "result.json"])
def test_somebody_else_s_files_are_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(espalier.BadInput, match="was not written by a run and would be overwritten; use another"):
        short(checkpoint=tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, '{"mine": 1}')]


def test_training_in_inference_mode_is_refused() -> None:
    model = networks.mlp()
    with torch.inference_mode(), pytest.raises(espalier.BadInput, match=r"torch.inference_mode\(\) forbids"):
        short(model)


def test_gates_are_taken_off_when_a_run_is_refused() -> None:
    model = networks.mlp()
    with pytest.raises(espalier.BadInput):
        short(model, target=2.0)
    espalier.attach(model, X[:4])


def test_nan_from_the_first_batch_names_the_update(tmp_path: Path) -> None:
    with pytest.raises(espalier.Diverged, match=r"update 1 of 8: every loss of an update was infinite or not a number"):
        short(data=(X * float("nan"), Y), checkpoint=tmp_path)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_data_that_are_not_finite_are_named(spoilt: float) -> None:
    x = X.clone()
    x[3, 5] = x[3, 6] = x[len(x) - 1, 0] = spoilt
    with pytest.raises(espalier.Diverged, match=r"left as it was\. \d of the \d+ examples hold NaN or infinity: mend"):
        short(data=(x, Y))
    with pytest.raises(espalier.Diverged, match=f"2 of the {len(X)} examples hold NaN or infinity"):
        espalier.sweep(networks.mlp, (x, Y), targets=[0.5], epochs=2, quiet=True)


class Bad:
    """A loss that goes wrong at some update."""

    def __init__(self, calls: int, wrong) -> None:
        self.left, self.wrong = calls, wrong

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.left -= 1
        loss = F.cross_entropy(outputs, targets)
        return loss if self.left >= 0 else self.wrong(loss)


def test_divergence_in_the_middle_leaves_the_checkpoint_intact(tmp_path: Path) -> None:
    """And the run goes on from it once the cause is gone."""
    whole = networks.mlp()
    short(whole, loss=Bad(10**6, None), settle=0.0)
    with pytest.raises(espalier.Diverged, match=r"update 6 of 8: .*What was saved in .* is intact"):
        short(loss=Bad(10, lambda loss: loss * float("inf")), checkpoint=tmp_path, settle=0.0)
    settings = json.loads((tmp_path / "settings.json").read_text())["settings"]
    state = Checkpoint(tmp_path, settings).load()
    assert state is not None
    assert 1 <= state["engine"]["structure"]["update"] <= 5
    assert all(tensor.isfinite().all() for tensor in state["engine"]["model"].values())
    again = networks.mlp()
    result = short(again, loss=Bad(10**6, None), checkpoint=tmp_path, settle=0.0)
    assert result.finished
    for a, b in zip(again.parameters(), whole.parameters(), strict=True):
        assert a.equal(b)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finite loss may have an infinite gradient; nobody could go on from a checkpoint of such weights."""
    monkeypatch.setattr("espalier.train.loop.SAVING", 1e9)  # a checkpoint after every update
    monkeypatch.setattr("espalier.train.loop.LOOK", 0.0)
    infinite = Bad(10, lambda loss: loss + (loss - loss.detach()).abs().sqrt())
    with pytest.raises(espalier.Diverged, match="update 6 of 8: the weights are no longer finite"):
        short(loss=infinite, checkpoint=tmp_path, settle=0.0)
    settings = json.loads((tmp_path / "settings.json").read_text())["settings"]
    state = Checkpoint(tmp_path, settings).load()
    assert state is not None
    assert state["engine"]["structure"]["update"] == 5
    assert all(tensor.isfinite().all() for tensor in state["engine"]["model"].values())


def no_memory(loss: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.mark.parametrize("wrong", [no_memory, lambda loss: torch.empty(1 << 52)])
def test_out_of_memory_says_what_to_do(wrong: object, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"smaller batch_size"):
        short(loss=Bad(6, wrong), checkpoint=tmp_path)
    assert list(tmp_path.glob("checkpoint-*.safetensors"))


def test_other_errors_are_the_user_s_own() -> None:
    def broken(loss: Tensor) -> Tensor:
        raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match=r"^my own mistake$"):
        short(loss=Bad(3, broken))


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = short(target=0.5)
    real, files = os.fsync, []

    def full(handle: int) -> None:
        files.append(handle)
        if len(files) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr("espalier.train.loop.SAVING", 1e9)  # a checkpoint after every update
    monkeypatch.setattr("espalier.train.loop.LOOK", 0.0)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotSaved, match="the disk is full"):
        short(target=0.5, checkpoint=tmp_path)
    monkeypatch.undo()
    assert len(list(tmp_path.glob("checkpoint-*.safetensors"))) == 2
    assert not list(tmp_path.glob("*.partial"))
    assert short(target=0.5, checkpoint=tmp_path).theta.equal(reference.theta)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(NotSaved, match="could not be written") as caught:
        short(checkpoint=tmp_path / "run")
    assert "intact" not in str(caught.value)  # nothing was saved


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target": 0.25}, "target: 0.5 there, 0.25 here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"epochs": 3}, "epochs: 2 there, 3 here"),
        ({"samples": 3}, "samples: 1 there, 3 here"),
        ({"recipe": "finetune"}, "recipe"),
        ({"optimizer": lambda p: torch.optim.Adam(p)}, "optimizer.*SGD.*Adam"),
        ({"data": (X[:64], Y[:64])}, '"examples": 128.*"examples": 64'),
        ({"data": (one_pixel(X), Y)}, "data: .*sha256"),
        ({"data": Dataset("d", X, Y, X, Y, CLASSES, 0.5, ZERO, ZERO + 1)}, "data: .*scale"),
        ({"validation": (one_pixel(X), Y)}, "validation: "),
        ({"optimizer": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.5)}, "optimizer: .*weight_decay"),
        ({"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 7)}, "scheduler: .*step_size.*7"),
        ({"model": networks.mlp(20)}, "model: .*there.*here.*space"),
        ({"model": nn.Sequential(*[nn.Tanh() if i % 2 else m for i, m in enumerate(networks.mlp())])}, "model: "),
        ({"loss": lambda o, t: 2 * F.cross_entropy(o, t)}, "loss: .*cross_entropy.*lambda"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_with_both_shown(
    settings: dict[str, object], says: str, tmp_path: Path
) -> None:
    short(target=0.5, checkpoint=tmp_path)
    before = networks.files(tmp_path)
    with pytest.raises(espalier.BadInput, match=says):
        short(**{"target": 0.5, "checkpoint": tmp_path} | settings)
    assert networks.files(tmp_path) == before


def stepped(size: int):
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, size)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = networks.mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Mended(Own):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.net(x)


def test_a_scheduler_and_forward_are_compared_by_what_they_do(tmp_path: Path) -> None:
    short(checkpoint=tmp_path / "s", scheduler=stepped(1))
    with pytest.raises(espalier.BadInput, match=r"scheduler: .*\"step_size\": 1.*there.*\"step_size\": 2.*here"):
        short(checkpoint=tmp_path / "s", scheduler=stepped(2))
    assert short(checkpoint=tmp_path / "s", scheduler=stepped(1)).finished
    Mended.__qualname__, kept = Own.__qualname__, Mended.__qualname__
    short(Own(), checkpoint=tmp_path / "f")
    with pytest.raises(espalier.BadInput, match='model: "Own'):
        short(Mended(), checkpoint=tmp_path / "f")
    Mended.__qualname__ = kept


def test_what_cannot_be_checked_is_named_in_the_run(tmp_path: Path) -> None:
    class Loader:
        def __iter__(self):
            return iter(zip(X.split(16), Y.split(16)))

    short(data=Loader(), checkpoint=tmp_path)
    settings = json.loads((tmp_path / "settings.json").read_text())["settings"]
    assert settings["data"] == {"batches": 8, "unchecked": "the contents of a Loader"}


def test_gone_on_with_anyway_the_run_records_what_differed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr("espalier.train.loop.LOOK", 0.0)
        patch.setattr(Stop, "now", lambda self, spare=0.0: next(asked) == 5)
        assert not short(checkpoint=tmp_path).finished
    changed = (one_pixel(X), Y)
    with pytest.raises(espalier.BadInput, match=r"data: .*anyway"):
        short(data=changed, checkpoint=tmp_path)
    assert short(data=changed, checkpoint=tmp_path, resume="anyway").finished
    (forced,) = json.loads((tmp_path / "settings.json").read_text())["forced"]
    assert forced.startswith("data: ")
    with pytest.raises(espalier.BadInput, match="resume is 'same'"):
        short(checkpoint=tmp_path, resume="always")


def test_without_a_folder_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "tensors", lambda given: 1 / 0)
    assert short().finished


def weighing(share: float):
    return lambda o, t: share * F.cross_entropy(o, t)


def test_losses_without_a_name_are_told_apart(tmp_path: Path) -> None:
    smoothed = [functools.partial(F.cross_entropy, label_smoothing=share) for share in (0.1, 0.2)]
    modules = [nn.CrossEntropyLoss(label_smoothing=share) for share in (0.1, 0.2)]
    scaled = [(lambda o, t, s=share: s * F.cross_entropy(o, t)) for share in (1, 2)]
    held = [weighing(share) for share in (1, 2)]
    weighed = [nn.CrossEntropyLoss(torch.full((10,), share)) for share in (1.0, 2.0)]
    for i, (one, other) in enumerate((smoothed, modules, scaled, held, weighed)):
        folder = tmp_path / str(i)
        short(loss=one, checkpoint=folder)
        with pytest.raises(espalier.BadInput, match="loss: "):
            short(loss=other, checkpoint=folder)
        assert short(loss=one, checkpoint=folder).finished


@pytest.mark.parametrize("preset", [None, "finetune"])
def test_a_network_of_other_initial_weights_is_refused_with_both_shown(tmp_path: Path, preset: str | None) -> None:
    model = networks.mlp(seed=1)
    began, other = (fingerprint.weights(networks.mlp(seed=seed).parameters()) for seed in (1, 2))
    first = short(model, recipe=preset, target=0.5, checkpoint=tmp_path)
    with pytest.raises(espalier.BadInput, match=rf"began with: {began} there, {other} here"):
        short(networks.mlp(seed=2), recipe=preset, target=0.5, checkpoint=tmp_path)
    for again in (networks.mlp(seed=1), model):  # as it began, or as the run left it
        assert short(again, recipe=preset, target=0.5, checkpoint=tmp_path).mask.equal(first.mask)


def test_a_model_stopped_inside_an_epoch_of_a_loader_goes_on_in_the_same_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, model = list(zip(X.split(16), Y.split(16))), networks.mlp(seed=1)
    asked = itertools.count(1)
    with monkeypatch.context() as patch:
        patch.setattr("espalier.train.loop.LOOK", 0.0)
        patch.setattr(Stop, "now", lambda self, spare=0.0: next(asked) == 12)  # of 8 updates in an epoch, and its end
        stopped = short(model, batches, target=0.5, checkpoint=tmp_path)
    assert not stopped.finished
    assert stopped.updates == 11
    assert short(model, batches, target=0.5, checkpoint=tmp_path).finished
    with pytest.raises(espalier.BadInput, match="not those that the run"):
        short(networks.mlp(seed=3), batches, target=0.5, checkpoint=tmp_path)


@pytest.mark.parametrize(
    ("outputs", "targets", "words"),
    [
        (1, torch.randn(64, 1), "needs a score for each class"),
        (3, torch.randn(64, 3), "as probabilities of the classes"),
        (3, torch.zeros(64), "does not take outputs .* and targets float32"),
        (3, torch.zeros(64, 1, dtype=torch.int64), r"y\[:, 0\]"),
        (3, torch.arange(64) % 4, "classes from 0 to 3, but the network tells 3 apart"),
        (3, (torch.arange(64) % 3,), "the targets are a tuple; give loss="),
    ],
)
def test_targets_that_the_default_loss_cannot_learn_from_are_named(outputs, targets, words):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))
    with pytest.raises((BadInput, BadType), match=words):
        espalier.fit(model, (torch.randn(64, 4), targets), epochs=1, target=0.5, quiet=True)


def test_models_without_numbers_or_hooks_are_named():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    data = torch.randn(64, 4), torch.zeros(64, dtype=torch.int64)
    with pytest.raises(BadInput, match="to_empty"):
        espalier.fit(model.to("meta"), data, epochs=1, target=0.5, quiet=True)
