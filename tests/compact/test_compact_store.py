"""Keeping compact models: what comes back, and what is refused."""

import errno
import json

import pytest
import torch
from torch import nn

import espalier
from espalier import files
from espalier.compact import store
from espalier.models import DenseNet
from espalier.schema import CHECKSUM, sealed


class Tied(nn.Module):
    def __init__(self, inner=8):
        super().__init__()
        self.table, self.into, self.back = nn.Embedding(9, 6), nn.Linear(6, inner), nn.Linear(inner, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        h = self.table(tokens)
        return self.head(self.norm(h + self.back(torch.relu(self.into(h)))))


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model, x = Tied(), torch.randint(9, (3, 4))
    gated = espalier.attach(model, x)
    small = gated.compact((torch.arange(gated.d) % 3 > 0).float())
    espalier.save(small, tmp_path)
    return tmp_path, small, x


def test_what_was_saved_comes_back(saved):
    folder, small, x = saved
    again = espalier.load(folder, Tied)
    assert torch.equal(again(x), small(x))
    assert again.espalier_plan == small.espalier_plan
    assert again.head.weight is again.table.weight
    index = json.loads((folder / "plan.json").read_text())
    assert index["tied"] == {"head.weight": "table.weight"}
    assert "head.weight" not in index["tensors"]
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "plan.json"]


def test_selections_fills_and_stand_ins_come_back(tmp_path):
    torch.manual_seed(0)

    def factory():
        return DenseNet(depth=13, growth=3, classes=4, stem=4)

    model, x = factory(), torch.randn(2, 3, 8, 8)
    gated = espalier.attach(model, x)
    for i, share in enumerate((0.7, 0.4, 0.1)):
        small = gated.compact((torch.rand(gated.d) < share).float()).eval()
        espalier.save(small, tmp_path / str(i))
        assert torch.equal(espalier.load(tmp_path / str(i), factory).eval()(x), small(x))


def test_what_is_compiled_is_kept_and_loaded_as_the_module_inside(saved, tmp_path):
    _, small, x = saved
    espalier.save(torch.compile(small, backend="eager"), tmp_path / "compiled")
    again = espalier.load(tmp_path / "compiled", lambda: torch.compile(Tied(), backend="eager"))
    assert type(again) is Tied
    assert torch.equal(again(x), small(x))


def test_another_dtype_comes_back(saved, tmp_path):
    _, small, x = saved
    espalier.save(small.double(), tmp_path / "double")
    again = espalier.load(tmp_path / "double", Tied)
    assert again.into.weight.dtype == torch.float64
    assert torch.equal(again(x), small(x))


def test_a_changed_tensor_is_corrupt(saved):
    folder, _, _ = saved
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(espalier.Corrupt, match="checksum"):
        espalier.load(folder, Tied)


@pytest.mark.parametrize("file", ["model.safetensors", "plan.json"])
@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_corrupt(saved, file, keep):
    folder, _, _ = saved
    data = (folder / file).read_bytes()
    (folder / file).write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(espalier.Corrupt, match=file):
        espalier.load(folder, Tied)


@pytest.mark.parametrize("file", ["model.safetensors", "plan.json"])
def test_a_missing_file_is_corrupt(saved, file):
    folder, _, _ = saved
    (folder / file).unlink()
    with pytest.raises(espalier.Corrupt, match=file):
        espalier.load(folder, Tied)


def edited(folder, change):
    path = folder / "plan.json"
    index = json.loads(path.read_text())
    change(index)
    index.pop(CHECKSUM)
    path.write_text(sealed(index))  # whoever writes it on purpose


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda i: i.update(format=3), "format 3"),
        (lambda i: i["plan"].update(format=7), "format 7"),
        (lambda i: i.pop("format"), "format"),
        (lambda i: i.pop("plan"), "damaged"),
        (lambda i: i["plan"].pop("tensors"), "damaged"),
        (lambda i: i["tensors"].pop("into.bias"), "into.bias"),
        (lambda i: i["tied"].update({"head.weight": "nothing"}), "nothing"),
        (lambda i: i["plan"]["tensors"].pop("into.weight"), "shape"),
    ],
)
def test_a_changed_index_is_corrupt(saved, change, match):
    folder, _, _ = saved
    edited(folder, change)
    with pytest.raises(espalier.Corrupt, match=match):
        espalier.load(folder, Tied)


@pytest.mark.parametrize("factory", [lambda: Tied(10), lambda: Tied(7), lambda: nn.Linear(6, 8)])
def test_a_wrong_factory_is_named(saved, factory):
    folder, _, _ = saved
    with pytest.raises(espalier.Corrupt, match="factory"):
        espalier.load(folder, factory)


def test_what_is_no_compact_model_is_not_saved(tmp_path):
    with pytest.raises(espalier.BadInput, match="compact"):
        espalier.save(nn.Linear(2, 2), tmp_path)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    espalier.save(espalier.attach(model, torch.randn(1, 2)).compact(torch.ones(3)), tmp_path)
    with pytest.raises(espalier.BadInput, match="factory"):
        espalier.load(tmp_path, lambda: "no module")


def test_bad_places_and_factories_are_named(saved, tmp_path):
    folder, small, _ = saved
    file = tmp_path / "afile"
    file.write_text("mine")
    for place in (file, str(file), file / "below"):
        with pytest.raises(espalier.BadInput, match=r"afile.* is a file, or below one"):
            espalier.save(small, place)
    assert file.read_text() == "mine"
    with pytest.raises(espalier.BadInput, match="string or a path, not by 3"):
        espalier.save(small, 3)
    with pytest.raises(espalier.BadInput, match="string or a path, not by None"):
        espalier.load(None, Tied)
    with pytest.raises(espalier.Corrupt, match="holds no compact model"):
        espalier.load(file, Tied)
    for factory, name in ((Tied(), "Tied"), (None, "NoneType"), ("Tied", "str")):
        with pytest.raises(espalier.BadInput, match=f"load takes a factory.*, not a {name}"):
            espalier.load(folder, factory)


@pytest.mark.parametrize("kind", ["os", "second"])
def test_a_full_disk_takes_away_nothing(saved, monkeypatch, kind):
    folder, small, _ = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(path, data):
        if kind == "os" or path.name == "plan.json":  # the second file: the first is complete by then
            raise OSError(errno.ENOSPC, "No space left on device")
        return files.write_beside(path, data)

    monkeypatch.setattr(store, "write_beside", full)
    with pytest.raises(espalier.BadInput, match=r"could not be written: .*No space left"):
        espalier.save(small, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


class Noted(nn.Sequential):
    """Its state holds what is no tensor: notes of its own, and torch's extra state of a module inside."""

    def state_dict(self, *args, **kwargs):
        return {**super().state_dict(*args, **kwargs), "notes": {"version": 2}}

    def load_state_dict(self, state, *args, **kwargs):
        return super().load_state_dict({name: value for name, value in state.items() if name != "notes"})


class Counted(nn.ReLU):
    def get_extra_state(self):
        return {"seen": [1, 2]}

    def set_extra_state(self, state):
        assert state == {"seen": [1, 2]}


def test_a_state_with_more_than_tensors_is_kept_and_gone_on_with(tmp_path):
    def network():
        torch.manual_seed(0)
        return Noted(nn.Linear(4, 8), Counted(), nn.Linear(8, 2))

    data = (torch.randn(32, 4), torch.randint(0, 2, (32,)))
    how = {"target": 0.5, "quiet": True, "validation": data, "monitor": "loss", "epochs": 4, "batch_size": 8}
    result = espalier.fit(network(), data, **how)
    stopped = espalier.fit(network(), data, checkpoint=tmp_path / "run", time_limit=1e-6, **how)
    again = espalier.fit(network(), data, checkpoint=tmp_path / "run", **how)
    assert (stopped.finished, again.finished) == (False, True)
    espalier.save(result.model, tmp_path / "small")
    loaded = espalier.load(tmp_path / "small", network)
    for model in (again.model, loaded):
        assert torch.equal(model(data[0]), result.model(data[0]))


def test_a_type_that_safetensors_does_not_know_is_refused_by_name(tmp_path):
    small = espalier.attach(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)), torch.randn(3, 4))
    small = small.compact(torch.tensor([1.0, 0, 1, 0, 1, 1]))
    small.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(espalier.BadInput, match=r"phase: safetensors stores no torch\.complex128"):
        espalier.save(small, tmp_path)
    assert not list(tmp_path.iterdir())
