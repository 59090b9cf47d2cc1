"""The scripts of examples/ run, and do what they say. Those for other libraries are run by their own tests."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
# How many percent each example keeps at most, and how many of its answers are wrong at most.
BOUNDS = {
    "cnn_to_onnx": (30, 8), "transformer": (40, 12), "lstm": (25, 12), "own_loop": (30, 12), "augmentation": (30, 8),
}  # fmt: skip
OTHERS = {"finetune", "unet", "sweep_and_report", "placed_gates", "transformers_shipped"}
ELSEWHERE = {"features", "with_lightning", "with_transformers"}  # tests/integrations


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """What an example prints, run in an empty folder; torch's random state is left as it was."""
    monkeypatch.chdir(tmp_path)
    state = torch.get_rng_state()

    def printed(name):
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
        return capsys.readouterr().out

    yield printed
    torch.set_rng_state(state)


@pytest.mark.parametrize("name", BOUNDS)
def test_it_ends_at_its_size_and_has_learned(name, run):
    if name == "cnn_to_onnx":
        pytest.importorskip("onnxscript")
    found = re.search(r"kept: ([\d.]+)%, error [^\d]*(?:\d+ test images: )?([\d.]+)%", run(name))
    kept, wrong = map(float, found.groups())
    most, errors = BOUNDS[name]
    assert 0.8 * most < kept <= most
    assert wrong < errors


def test_a_trained_network(run):
    before, after, share = map(float, re.findall(r"([0-9.]+)%", run("finetune").replace("100%", "")))
    assert before < 4
    assert after < before + 2
    assert share <= 50


def test_a_u_net(run):
    kept, right = map(float, re.search(r"kept: ([\d.]+)%, pixels right: ([\d.]+)%", run("unet")).groups())
    assert kept <= 30
    assert right > 85  # 69% of the pixels are empty


def test_many_sizes_and_a_page_of_them(run, tmp_path):
    errors = [float(error) for error in re.findall(r"error ([\d.]+)%", run("sweep_and_report"))]
    assert len(errors) == 8
    assert sum(errors[-2:]) < sum(errors[:2]) < 60
    assert (tmp_path / "sizes" / "report.html").exists()


def test_gates_by_hand(run):
    text = run("placed_gates")
    assert len(re.search(r"filters kept: \[(.*?)\]", text)[1].split(",")) == 2
    assert float(re.search(r"error ([\d.]+)%", text)[1]) < 6
    after, before = (int(number.replace(",", "")) for number in re.search(r"([\d,]+) of ([\d,]+)", text).groups())
    assert after < before


def test_a_cut_model_of_transformers_loads_again(run):
    pytest.importorskip("transformers")
    found = re.search(r"([\d,]+) of ([\d,]+) parameters; .* are (\w+)", run("transformers_shipped"))
    after, before, outputs = found.groups()
    assert int(after.replace(",", "")) < int(before.replace(",", ""))
    assert outputs == "equal"


def test_every_example_is_run_and_listed():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*BOUNDS, *ELSEWHERE, *OTHERS}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {Path(link).stem for link in re.findall(r"\]\((.*?\.py)\)", page)} == names
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "integrations").glob("*.py"))
    assert all(f'"{name}.py"' in tests for name in ELSEWHERE)
