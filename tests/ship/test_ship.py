"""`espalier.ship` from Python: results of fit and of sweep, run directories, formats, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.ship import FORMATS
from espalier.space import BadInput, BadType


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    return inputs, inputs[:, :3].argmax(1)


@pytest.fixture(scope="module")
def result() -> espalier.train.Result:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"loss": nn.functional.cross_entropy, "epochs": 2, "batch_size": 16, "target": 0.5}
    return espalier.fit(Net(), data(), validation=data(), quiet=True, device="cpu", **arguments)


def test_a_result_is_written_checked_timed_and_described(result, tmp_path):
    shipped = espalier.ship(result, tmp_path / "small", model=Net)
    assert torch.equal(result.examples, data()[0][:64])
    assert shipped.files == ["model.safetensors", "plan.json", "README.md"]
    assert shipped.checks == {"examples": 64}
    assert set(shipped.speed) == {1, 64}
    kept = int(result.mask.sum())
    assert shipped.sizes == result.sizes == {
        "units": [kept, 12], "weights": [9 * kept, 108], "macs": [9 * kept, 108], "parameters": [10 * kept + 3, 123],
    }  # fmt: skip
    again = espalier.load(tmp_path / "small", Net).eval()
    assert torch.equal(again(data()[0]), result.model(data()[0]))
    text = (tmp_path / "small" / "README.md").read_text()
    for words in ("# small", "a target of 50.00%", f"| gates | {kept} | 12 |", "96 examples", "64 real examples"):
        assert words in text
    assert f"from {Net.__module__} import Net" in text
    assert "How it was made" not in text


def test_without_examples_its_tensors_are_compared_and_without_a_factory_it_is_only_written(result, tmp_path):
    shipped = espalier.ship(replace(result, examples=None), tmp_path / "a", model=Net)
    assert (shipped.checks, shipped.speed) == ({"tensors": 4}, {})
    shipped = espalier.ship(result, tmp_path / "b", inputs=data()[0][:4])
    assert (shipped.checks, shipped.speed) == ({}, {})
    assert "factory()" in (tmp_path / "b" / "README.md").read_text()
    assert espalier.load(tmp_path / "b", Net)
    assert espalier.ship(result, tmp_path / "b", model=lambda: Net()).files  # again, over what it wrote itself


def test_a_file_of_another_network_is_not_left_beside_the_card(result, tmp_path):
    inputs, folder = data()[0][:4], tmp_path / "small"
    espalier.ship(result, folder, inputs=inputs, formats=["python"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(BadInput, match=r"small holds network.py from before; ask for the format python too"):
        espalier.ship(result, folder, inputs=inputs, formats=["pt2"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert "model.pt2" in espalier.ship(result, folder, inputs=inputs, formats=["pt2", "python"]).files


def test_a_format_that_fails_leaves_no_card_and_no_file_of_the_network_before(result, tmp_path, monkeypatch):
    inputs, folder = data()[0][:4], tmp_path / "small"
    espalier.ship(result, folder, inputs=inputs, formats=["python"])

    def fails(*_: Any) -> Any:
        raise BadInput("no")

    monkeypatch.setitem(FORMATS, "python", fails)
    with pytest.raises(BadInput, match="no"):
        espalier.ship(result, folder, inputs=inputs, formats=["python"])
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "plan.json"}


def test_a_factory_named_in_text_is_named_on_the_card(result, tmp_path):
    layers = "nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3)"
    (tmp_path / "net.py").write_text(f"from torch import nn\n\n\ndef build():\n    return nn.Sequential({layers})\n")
    espalier.ship(result, tmp_path / "small", model=f"{tmp_path / 'net.py'}:build")
    text = (tmp_path / "small" / "README.md").read_text()
    for words in ("from net import build", "lambda: build()", "with `net.py` beside it or its folder in `PYTHONPATH`"):
        assert words in text


def test_a_result_of_a_sweep_ships_as_well(tmp_path):
    (one,) = espalier.sweep(Net, data(), penalties=[0.5], epochs=1, batch_size=32, quiet=True, device="cpu")
    assert torch.equal(one.examples, data()[0][:64])
    shipped = espalier.ship(one, tmp_path / "small", model=Net, inputs=data()[0][:5])
    assert shipped.checks == {"examples": 5}
    text = (tmp_path / "small" / "README.md").read_text()
    assert "a penalty of 0.5 on the weights" in text
    assert "Nothing was held out" in text


@pytest.mark.parametrize("how", ["fit", "sweep"])
def test_the_run_directory_of_fit_and_of_sweep_ships(how, tmp_path):
    arguments: dict[str, Any] = {"epochs": 2, "batch_size": 16, "validation": data(), "quiet": True, "device": "cpu"}
    torch.manual_seed(0)
    if how == "fit":
        result, run = (
            espalier.fit(Net(), data(), target=0.5, checkpoint=tmp_path / "run", **arguments),
            tmp_path / "run",
        )
    else:
        result = espalier.sweep(Net, data(), targets=[0.5, 0.8], checkpoint=tmp_path / "runs", **arguments)[0]
        run = tmp_path / "runs" / "run-000"
    with pytest.raises(BadInput, match="give the uncut one"):
        espalier.ship(run, tmp_path / "small")
    shipped = espalier.ship(run, tmp_path / "small", model=Net)
    kept = int(result.mask.sum())
    assert shipped.sizes == {
        "units": [kept, 12], "weights": [9 * kept, 108], "macs": [9 * kept, 108], "parameters": [10 * kept + 3, 123],
    }  # fmt: skip
    assert shipped.checks == {"examples": 64, "difference": 0.0}
    assert set(shipped.speed) == {1, 64}
    again = espalier.load(tmp_path / "small", Net).eval()
    assert torch.equal(again(data()[0]), result.model(data()[0]))
    card = (tmp_path / "small" / "README.md").read_text()
    for words in ("a target of 50.00% of the weights", "96 examples", "64 real examples", "How it was made", "torch 2"):
        assert words in card
    assert '"space"' not in card  # nor every channel in blocks: settings.json of the run has them

    class Other(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

    with pytest.raises(BadInput, match="does not answer as the trained one did"):
        espalier.ship(run, tmp_path / "other", model=Other)


@pytest.mark.parametrize("how", ["fit", "sweep"])
def test_a_card_says_how_stored_inputs_are_prepared(how, tmp_path):
    """As it does for files, of data that a Dataset reads by a scale of its own; by hand they are what it says."""
    pixels = torch.randint(0, 256, (96, 6), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pair = pixels, pixels[:, :3].int().argmax(1)
    scaled = espalier.data.from_arrays(pair, pair, scale=1 / 255)
    arguments: dict[str, Any] = {"epochs": 1, "batch_size": 16, "quiet": True, "device": "cpu"}
    for name, given, words in (
        ("scale", scaled, f"the stored numbers times {1 / 255:.9g}"),
        ("standard", scaled.standardised(), f"the stored numbers times {1 / 255:.9g} less the mean ["),
        ("plain", espalier.data.from_arrays(pair, pair), "as they are"),
        ("pair", (pixels / 255, pair[1]), "as they were in training"),
    ):
        run = tmp_path / name
        if how == "fit":
            result = espalier.fit(Net(), given, target=0.5, checkpoint=run, **arguments)
        else:
            (result,) = espalier.sweep(Net, given, targets=[0.5], checkpoint=run, **arguments)
            run = run / "run-000"
        for what in (result, run):
            espalier.ship(what, tmp_path / f"{name}-small", model=Net)
            assert f"Inputs are {words}" in (tmp_path / f"{name}-small" / "README.md").read_text()
        if name == "scale":
            by_hand = nn.functional.cross_entropy(result.model(pixels.double().mul(1 / 255).float()), pair[1])
            assert result.validation_loss == pytest.approx(by_hand.item(), abs=1e-5)


def test_onnx_and_a_format_from_outside(result, tmp_path, monkeypatch):
    def shapes(small: nn.Module, inputs: Any, folder: Path) -> tuple[list[str], dict[str, Any]]:
        (folder / "shapes.json").write_text(json.dumps([list(p.shape) for p in small.parameters()]))
        return ["shapes.json"], {"shapes": len(list(small.parameters()))}

    monkeypatch.setitem(FORMATS, "shapes", shapes)
    shipped = espalier.ship(result, tmp_path / "small", model=Net, formats=["shapes"])
    assert shipped.files == ["model.safetensors", "plan.json", "README.md", "shapes.json"]
    assert shipped.checks["shapes"] == 4
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    shipped = espalier.ship(result, tmp_path / "onnx", formats=("torch", "onnx"))
    assert shipped.checks["onnx"]["difference"] < 1e-4
    assert "onnxruntime" in (tmp_path / "onnx" / "README.md").read_text()


def test_what_is_refused_says_why(result, tmp_path):
    with pytest.raises(BadInput, match="no format 'tflite'; known are torch, onnx"):
        espalier.ship(result, tmp_path / "a", formats=["tflite"])
    with pytest.raises(BadInput, match="onnx needs some real examples"):
        espalier.ship(replace(result, examples=None), tmp_path / "a", formats=["onnx"])
    with pytest.raises(BadType, match="a result or a run directory, not a Linear"):
        espalier.ship(nn.Linear(1, 1), tmp_path / "b")
    with pytest.raises(BadType, match=r"model is a factory of the uncut network: give its class, or lambda: Linear"):
        espalier.ship(result, tmp_path / "b", model=nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"does not take these inputs, float32 \(3, 99\)"):
        espalier.ship(result, tmp_path / "b", inputs=torch.zeros(3, 99))
    with pytest.raises(BadInput, match="there is no folder"):
        espalier.ship(tmp_path / "nothing", tmp_path / "b")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(BadInput, match="holds other files"):
        espalier.ship(result, tmp_path / "mine")
    assert not (tmp_path / "b").exists()
