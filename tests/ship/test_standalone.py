"""What ships without Espalier: ONNX, torch.export and a Python file are loaded in a process that cannot import it."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import espalier
from espalier.compact.exported import exported, plain_outputs
from espalier.compact.layers import Select
from espalier.models import DenseNet
from espalier.ship.delivery import FORMATS
from espalier.ship.parity import NotExported
from espalier.ship.standalone import export
from espalier.space import BadInput
from zoo.catalogue import BY_NAME
from zoo.entry import call, flat, tensors

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
FREE = ("onnx", "pt2", "python")


class Doubtful(nn.Module):
    """Words that are no names in Python, one layer called twice, a tied weight, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.training_ = nn.Linear(6, 6)
        self.halves = nn.ModuleDict({"0": nn.Linear(6, 8), "1": nn.Linear(8, 6)})
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table_weight", torch.linspace(0, 1, 6))

    def forward(self, device: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.training_(torch.tanh(self.training_(self.table(device) + self.table_weight)))
        h = self.halves["1"](torch.relu(self.halves["0"](h))) * self.scale
        return {"scores": h @ self.table.weight.T, "first": h[:, 0, 1:-1]}


class Block(nn.Module):
    """A residual block: closed, zeros or a bias stand in for its branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, width, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.branch(x))


class Placed(nn.Module):
    """Gates placed by hand on the connections of a branch (its closed places are filled with zeros) and of a reader."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch = nn.Linear(5, 6), nn.Linear(6, 6)
        self.places, self.sources = espalier.Gate(6), espalier.Gate([4, 2, 4])
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.stem(x))
        h = h + self.places(torch.relu(self.branch(h)))
        return self.head(self.sources(torch.cat([h[:, :4], h[:, 4:], h[:, 2:]], 1)))


def networks() -> dict[str, tuple[nn.Module, object]]:
    """Small ones that have, after the cut, every plain layer of ours: selections, zeros, biases, filled places."""
    torch.manual_seed(1)
    images = torch.randn(4, 1, 6, 6)
    made: dict[str, tuple[nn.Module, object]] = {"odd names": (Doubtful(), torch.randint(0, 11, (4, 5)))}
    made["branches"] = nn.Sequential(nn.Conv2d(1, 4, 3), Block(4), Block(4), nn.Flatten(), nn.Linear(64, 3)), images
    for name in ("MLP, inputs too", "LSTM, both ways"):
        entry = BY_NAME[name]
        made[name] = entry.build().float(), entry.inputs()
    return made


def kept(folder: Path, inputs: torch.Tensor, outputs: Iterable[torch.Tensor]) -> Path:
    named = {f"o{i}": output.detach().contiguous() for i, output in enumerate(outputs)}
    save_file({"i0": inputs, **named}, folder / "expected.safetensors")
    return folder


def first_scores(output, labels):
    return F.cross_entropy(output.logits.flatten(1)[:, :5], labels)


@pytest.fixture(scope="module")
def transformers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of Transformers, cut to heads, units and width by ``fit`` and written as ONNX by ``ship``."""
    pytest.importorskip("transformers")
    folders = {}
    for name in ("GPT-2", "BERT", "ViT"):
        torch.manual_seed(0)
        inputs = torch.randn(8, 3, 16, 16) if name == "ViT" else torch.randint(0, 20, (8, 7))
        gated = espalier.attach(BY_NAME[name].build().float(), inputs, kinds=("units", "heads", "width"))
        labels = torch.arange(8) % 5
        how = {"loss": first_scores, "target": 0.3, "epochs": 2, "batch_size": 4, "device": "cpu", "quiet": True}
        result = espalier.fit(gated, (inputs, labels), **how)
        folder = folders[name] = tmp_path_factory.mktemp("shipped")
        build = lambda name=name: BY_NAME[name].build().float()  # noqa: E731
        told = espalier.ship(result, folder / "small", model=build, inputs=inputs, formats=("onnx",))
        assert told.checks["onnx"]["difference"] <= 1e-5
        (folder / "small" / "model.onnx").rename(folder / "model.onnx")
        kept(folder, inputs[:5], [result.model.cpu().eval()(inputs[:5]).logits])
    return folders


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, (model, inputs) in networks().items():
        kinds = BY_NAME[name].kinds if name in BY_NAME else ("units", "channels", "heads", "branches")
        inputs = inputs.float() if inputs.is_floating_point() else inputs
        gated = espalier.attach(model.eval(), inputs, kinds=kinds)
        mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(3)) < 0.6).float()
        for group in (g for g in gated.space.groups if g.name.endswith("branch+")):
            mask[gated.space.slices[group.name]] = 0.0
            break
        small = gated.compact(mask).eval()
        folder = folders[name] = tmp_path_factory.mktemp("shipped")
        for kind in FREE:
            FORMATS[kind](small, inputs, folder)
        with torch.no_grad():
            outputs = list(tensors(call(small, inputs)))
        kept(folder, inputs, outputs)
    return folders


def test_each_format_answers_in_a_process_without_espalier(shipped, transformers):
    script = Path(__file__).with_name("loaded_apart.py")
    folders = map(str, (*shipped.values(), *transformers.values()))
    done = subprocess.run([sys.executable, str(script), *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report) == len(shipped) + len(transformers)
    for name, folder in transformers.items():
        assert report[folder.name].keys() == {"onnx"}
        assert report[folder.name]["onnx"] <= 1e-5, name
    for name, folder in shipped.items():
        told = report[folder.name]
        for kind in FREE:
            assert told[kind] <= 1e-6, (name, kind, told[kind])
        assert all(one.startswith("torch.nn.") for one in told["classes"]), told["classes"]


def test_the_file_is_plain_torch_with_widths_written_out(shipped):
    for name, folder in shipped.items():
        text = (folder / "network.py").read_text()
        assert "espalier" not in text
        imported = {
            getattr(node, "module", None) or node.names[0].name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }
        assert imported == {"pathlib", "torch", "torch.nn.functional", "safetensors.torch"}, name
    lstm = BY_NAME["LSTM, both ways"].build()
    text = (shipped["LSTM, both ways"] / "network.py").read_text()
    width = int(text.split("nn.LSTM(")[1].split(",")[1])
    assert 0 < width < lstm.rnn.hidden_size
    assert "self.halves_1 = nn.Linear(" in (shipped["odd names"] / "network.py").read_text()


def test_a_file_that_answers_otherwise_is_not_kept(tmp_path, monkeypatch):
    from espalier.ship import standalone

    model, inputs = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(5, 3)
    monkeypatch.setitem(standalone.FORMS, "gelu", lambda *_: "torch.relu(x)")
    with pytest.raises(NotExported, match=r"network.py: at 1 real examples it differs"):
        export(model, inputs, tmp_path / "network.py")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layer", "shape", "text"),
    [
        (nn.LayerNorm((4, 4)), (4, 4), "nn.LayerNorm((4, 4))"),
        (nn.RMSNorm(6, eps=1e-3), (6,), "nn.RMSNorm(6, eps=0.001)"),
        (nn.Conv2d(4, 6, (3, 5), stride=(1, 2), groups=2, bias=False), (4, 9, 9),
         "nn.Conv2d(4, 6, (3, 5), stride=(1, 2), groups=2, bias=False)"),
        (nn.ConvTranspose1d(4, 2, 3, padding=1, dtype=torch.float64), (4, 5),
         "nn.ConvTranspose1d(4, 2, 3, padding=1, dtype=torch.float64)"),
        (nn.BatchNorm1d(3, momentum=0.2, affine=False), (3,), "nn.BatchNorm1d(3, momentum=0.2, affine=False)"),
    ],
)  # fmt: skip
def test_a_layer_is_written_as_it_was_made(tmp_path, layer, shape, text):
    kind = next((p.dtype for p in layer.parameters()), torch.float32)
    export(nn.Sequential(layer, nn.ReLU()).eval(), torch.randn(3, *shape, dtype=kind), tmp_path / "network.py")
    assert f" = {text}\n" in (tmp_path / "network.py").read_text()


class Frequencies(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / 10.0 ** x.sigmoid())


def test_a_number_to_the_power_of_a_tensor(tmp_path):
    model, inputs = Frequencies(4, 2).eval(), torch.randn(3, 4)
    export(model, inputs, tmp_path / "network.py")
    assert "10.0 ** " in (tmp_path / "network.py").read_text()


class InFull(nn.Linear):
    """As positions are computed in many language models."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            first, rest = torch.sin(x), x.cos()
            with torch.autocast("cuda", enabled=False):
                first = first * self.bias[:1]
        return super().forward(first + rest)


class InHalf(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def test_what_runs_with_autocast_switched_off_is_written_as_all_else(tmp_path):
    with pytest.raises(NotExported, match="a part that runs by wrap_with_autocast: ship it as pt2"):
        export(InHalf(4, 2).eval(), torch.randn(3, 4), tmp_path / "network.py")
    export(InFull(4, 2).eval(), torch.randn(3, 4), tmp_path / "network.py")
    assert "x.cos()" in (tmp_path / "network.py").read_text()


class CountsExamples(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * len(list(x))


class OfLength(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.ones(len(x), 1)


class Heads(nn.Module):
    """Keeps a number twice, and is copied from the first, as a layer of einops is."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.given, self.heads = {"heads": heads}, (heads,)

    def __getstate__(self) -> dict[str, int]:
        return self.given

    def __setstate__(self, state: dict[str, int]) -> None:
        Heads.__init__(self, state["heads"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads[0], -1)).cumsum(-1).flatten(-2)


def test_a_module_that_is_copied_from_what_it_was_made_with_ships_as_it_was_cut(tmp_path):
    model, x = nn.Sequential(nn.Linear(3, 12), Heads(4), nn.Linear(12, 2)).eval(), torch.randn(4, 3)
    model[1].heads = (3,)
    export(model, x, tmp_path / "network.py")
    again = runpy.run_path(str(tmp_path / "network.py"))["load"]()
    assert torch.equal(again(x), model(x))


class Options(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float, mask: torch.Tensor | None, how: str) -> torch.Tensor:
        return super().forward(x * scale if how == "scaled" and mask is None else x)


class AnyWords(nn.Linear):
    def forward(self, **words: torch.Tensor) -> torch.Tensor:
        return super().forward(words["x"]) * words["weight"]


@pytest.mark.parametrize("kind", FREE)
def test_arguments_that_are_no_tensors_are_written_into_every_file(kind, tmp_path):
    x = torch.randn(4, 3)
    for inputs in ((x, 2.0, None, "scaled"), {"x": x, "mask": None, "how": "scaled", "scale": 2.0}):
        _, told = FORMATS[kind](Options(3, 2).eval(), inputs, tmp_path)
        names = [name for name, _, _ in told[kind]["inputs"]]
        assert names == (["x"] if isinstance(inputs, dict) else ["inputs"] if kind == "onnx" else ["input 0"])


@pytest.mark.parametrize("kind", FREE)
def test_a_network_that_takes_any_words_is_written(kind, tmp_path):
    inputs = {"x": torch.randn(4, 3), "weight": torch.rand(4, 1)}
    _, told = FORMATS[kind](AnyWords(3, 2).eval(), inputs, tmp_path)
    assert [name for name, _, _ in told[kind]["inputs"]] == ["x", "weight"]


class Emptied(nn.Module):
    """Of two branches nothing is left to read; one has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.first, self.second = nn.Linear(4, 0), nn.Linear(0, 3), nn.Linear(0, 3, bias=False)
        self.leave = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.enter(x)).view(*x.shape[:-1], -1, 7).flatten(-2)
        return self.leave(self.first(h) + self.second(h))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_what_reads_nothing_is_its_bias_in_every_file(tmp_path):
    model, inputs = Emptied().eval(), torch.randn(4, 5, 4)
    torch.nn.init.normal_(model.first.bias)
    expected = model.leave(model.first.bias).expand(4, 5, 2)
    assert torch.equal(model(inputs), expected)
    for kind in FREE:
        FORMATS[kind](model, inputs, tmp_path)  # each is checked against torch before it is kept
    text = (tmp_path / "network.py").read_text()
    assert "enter" not in text
    assert "expand" in text


def test_a_network_of_one_batch_size_is_refused(tmp_path):
    with pytest.raises(NotExported, match="one batch size alone"):
        export(CountsExamples(2, 2), torch.randn(5, 2), tmp_path / "network.py")
    with pytest.raises(NotExported, match=r"one batch size alone: .* as len\(x\) does"):
        export(OfLength(2, 2), torch.randn(5, 2), tmp_path / "network.py")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BadInput, match="python needs some real examples"):
        FORMATS["python"](nn.Linear(2, 2), None, tmp_path)


def test_filled_places_of_hand_placed_gates_are_plain_operations(tmp_path):
    torch.manual_seed(0)
    model, inputs = Placed().eval(), torch.randn(3, 5)
    gated = espalier.attach(model, inputs)
    mask = torch.ones(gated.d)
    mask[[1, 4, 7]] = 0
    small = gated.compact(mask).eval()
    assert {"Fill"} <= {type(module).__name__ for module in small.modules()}
    assert export(small, inputs, tmp_path / "network.py").difference <= 1e-6
    text = (tmp_path / "network.py").read_text()
    assert "espalier" not in text
    assert "index_select" in text


def test_a_selection_of_neighbours_is_a_view(tmp_path):
    model, inputs = nn.Sequential(Select([1, 2, 3], 1), nn.Linear(3, 2)), torch.randn(4, 6)
    export(model.eval(), inputs, tmp_path / "network.py")
    text = (tmp_path / "network.py").read_text()
    assert "[:, 1:4]" in text
    assert "index" not in text


class Joined(nn.Module):
    """Readers that select from three sources of four slices each, which were joined one after the other."""

    def __init__(self, *kept: list[int]) -> None:
        super().__init__()
        self.sources = nn.ModuleList(nn.Linear(5, 4) for _ in range(3))
        self.readers = nn.ModuleList(nn.Sequential(Select(index, 1), nn.Linear(len(index), 2)) for index in kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = (source(x) for source in self.sources)
        joined = torch.cat([torch.cat([a, b], 1), c], -1)
        return torch.cat([reader(joined) for reader in self.readers])


@pytest.mark.parametrize(
    ("kept", "sources", "gathers"),
    [
        ([[0, 1, 2, 3, 8, 9, 10, 11], [9, 10]], [2], 0),  # of two sources; of a part of one, which nothing has to join
        ([[2, 3, 4, 5]], [2], 0),  # of parts of two
        ([[0, 1, 3, 8, 9, 11]], [3], 1),  # in more pieces than there are sources
    ],
)
def test_what_is_selected_of_joined_tensors_is_joined_alone(tmp_path, kept, sources, gathers):
    torch.manual_seed(0)
    assert export(Joined(*kept).eval(), torch.randn(4, 5), tmp_path / "network.py").difference == 0.0
    text = (tmp_path / "network.py").read_text()
    joined = re.findall(r"torch.cat\(\[(.*)\], 1\)", text)
    assert [one.count(",") + 1 for one in joined] == sources, text
    assert text.count(".index_select(") == gathers, text


def test_an_exported_densenet_gathers_nothing():
    torch.manual_seed(0)
    gated = espalier.attach(DenseNet(22, 2), torch.randn(2, 3, 8, 8), check=False)
    small = gated.compact(gated.canonical((torch.rand(gated.d) < 0.5).float())).eval()
    assert any(isinstance(module, Select) and module.run is None for module in small.modules())
    x = torch.randn(3, 3, 8, 8)
    program = exported(plain_outputs(small), (x,), {})
    assert "index_select" not in str(program.graph)
    with torch.no_grad():
        assert torch.equal(program.module()(x), small(x))


@pytest.mark.parametrize("name", ["ELU", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "Mish", "ReLU6", "SiLU"])
def test_activations_in_place_are_functions_of_torch(name, tmp_path):
    model, inputs = nn.Sequential(nn.Linear(3, 4), getattr(nn, name)(inplace=True), nn.Linear(4, 2)), torch.randn(4, 3)
    FORMATS["python"](model, inputs, tmp_path)
    text = (tmp_path / "network.py").read_text()
    assert "inplace=True" in text
    assert "torch.ops" not in text


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_the_python_file_begin_in_the_type_of_their_inputs(kind, tmp_path):
    """A first state of zeros is left to the layer: written out, it would be float32, and its gates would be lost."""

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = kind(3, 8, 2, batch_first=True, bidirectional=True), nn.Linear(16, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0].mean(1))

    model, inputs = Read().eval(), torch.randn(4, 5, 3)
    FORMATS["python"](model, inputs, tmp_path)
    assert "zeros" not in (tmp_path / "network.py").read_text()
    again = runpy.run_path(str(tmp_path / "network.py"))["load"]()
    assert espalier.attach(again, inputs).d == espalier.attach(model, inputs).d > 0
    assert torch.equal(again.double()(inputs.double()), model.double()(inputs.double()))


def test_shrunk_twice_loads_from_the_uncut_network(tmp_path):
    for name in ("MLP, inputs too", "ResNet-20, branches too"):
        entry = BY_NAME[name]
        model, inputs = entry.build().eval(), entry.inputs()
        for seed in (0, 1):
            gated = espalier.attach(model, inputs, kinds=entry.kinds)
            mask = (torch.rand(gated.d, generator=torch.Generator().manual_seed(seed)) < 0.7).float()
            model = gated.compact(mask).eval()
        with torch.no_grad():
            masked = flat(call(model, inputs))
        espalier.save(model, tmp_path / name)
        again = espalier.load(tmp_path / name, entry.build).eval()
        with torch.no_grad():
            assert torch.equal(flat(call(again, inputs)), masked)
        assert again.espalier_plan == model.espalier_plan
        assert again.espalier_plan["format"] == 2
        with pytest.raises(espalier.Corrupt, match="compact"):
            espalier.load(tmp_path / name, lambda: again)  # noqa: B023


def test_save_pretrained_of_a_compact_model_loads_again(tmp_path):
    pytest.importorskip("transformers")
    from espalier.integrations.pretrained import from_pretrained

    for name in ("GPT-2", "GPT-NeoX, interleaved query-key-value"):  # tied embeddings; names of an earlier version
        entry = BY_NAME[name]
        model, inputs = entry.build().eval(), entry.inputs()
        gated = espalier.attach(model, inputs)
        small = gated.compact((torch.rand(gated.d, generator=torch.Generator().manual_seed(0)) < 0.6).float()).eval()
        small.save_pretrained(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(flat(call(from_pretrained(tmp_path / name), inputs)), flat(call(small, inputs)))
        assert not hasattr(model.config, "espalier_plan")
        model.save_pretrained(tmp_path / "whole")
        with pytest.raises(BadInput, match="no compact model"):
            from_pretrained(tmp_path / "whole")


def test_keys_of_a_module_dict_that_are_no_names(tmp_path):
    """As of columns of a table; some of them differ in what no name may hold."""

    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleDict({key: nn.Linear(1, 3) for key in ("user id", "user-id", "user_id", "größe")})

        def forward(self, x):
            return sum(part(x[:, i : i + 1]) for i, part in enumerate(self.parts.values()))

    torch.manual_seed(0)
    model = Columns()
    assert export(model, torch.randn(4, 4), tmp_path / "network.py").difference == 0


@dataclass
class Found:
    scores: torch.Tensor
    hidden: torch.Tensor
    note: str = ""


class Wrapped(nn.Module):
    """Hands on whatever it is given, and gives a dataclass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Bilinear(4, 3, 5)

    def forward(self, *args, **kwargs):
        hidden = self.inner(*args, **kwargs)
        return Found(hidden.relu(), hidden)


@pytest.mark.parametrize("form", FREE)
def test_a_forward_of_any_arguments_and_a_dataclass_of_outputs(form, tmp_path):
    torch.manual_seed(0)
    inputs = torch.randn(5, 4), torch.randn(5, 3)
    _, checks = FORMATS[form](Wrapped(), inputs, tmp_path)
    assert checks[form]["batches"] == (1, 2, 7, 33)
    assert checks[form]["difference"] < 1e-6
