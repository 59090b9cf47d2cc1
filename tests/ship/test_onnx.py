"""ONNX export: the file computes what the network does, at every batch size, or there is no file."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

import espalier
from espalier.gates.verify import distance

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
from espalier.ship.onnx import export, verify  # noqa: E402
from espalier.ship.parity import NotExported, random_like, repeated  # noqa: E402


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    )


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def test_a_compact_model_runs_in_onnxruntime_at_batch_sizes_it_was_not_exported_with(tmp_path):
    model = convolutional()
    x = torch.randn(16, 1, 6, 6)
    model(x)  # BatchNorm has seen something
    gated = espalier.attach(model, x)
    mask = torch.ones(gated.d)
    mask[::2] = 0
    small = gated.compact(gated.canonical(mask)).eval()
    checked = export(small, x, tmp_path / "deep" / "m.onnx")
    assert checked.difference < 1e-5
    assert checked.inputs == (("inputs", "tensor(float)", ("batch", 1, 6, 6)),)
    for batch in (1, 5, 16):
        (told,) = run(tmp_path / "deep" / "m.onnx", inputs=x[:batch].numpy())
        with torch.no_grad():
            np.testing.assert_allclose(told, small(x[:batch]).numpy(), rtol=1e-4, atol=1e-5)
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["m.onnx"]

    # Another network's file is refused, and so is one whose weights moved a little.
    with torch.no_grad():
        small[-1].bias += 0.01
    with pytest.raises(NotExported, match="differs from torch by"):
        verify(tmp_path / "deep" / "m.onnx", small, x)


class Attends(nn.Module):
    """Attention under a mask that the graph computes, between linear layers over (B, 6, 8)."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.qkv, self.out = kind, nn.Linear(8, 24), nn.Linear(8, 3)
        self.register_buffer("before", torch.ones(6, 6, dtype=torch.bool).tril(), persistent=False)

    def mask(self, x):
        at = torch.arange(x.shape[1])
        if self.kind == "open":
            return (at >= 0).view(1, 1, 1, -1).expand(x.shape[0], 1, 6, 6)
        if self.kind == "before":
            return (at <= at[:, None]).expand(x.shape[0], 1, 6, 6)
        if self.kind == "kept":
            return self.before
        if self.kind == "near":
            return ((at - at[:, None]).abs() <= 1).expand(x.shape[0], 1, 6, 6)
        return (x[..., 0] < 10).view(-1, 1, 1, 6).expand(-1, 1, 6, 6)  # open for every x that is seen here

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(query, key, value, self.mask(x))
        return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kind", "guarded"), [("open", False), ("before", False), ("kept", False), ("near", True), ("of x", True)]
)
def test_a_mask_of_attention_that_no_input_decides_costs_nothing(tmp_path, kind, guarded):
    """A boolean mask is added, and the softmax looked through for rows without any: see the nodes of the file."""
    from onnx import load

    torch.manual_seed(0)
    model, x = Attends(kind).eval(), torch.randn(4, 6, 8)
    assert export(model, x, tmp_path / "m.onnx").difference < 1e-5
    nodes = [node.op_type for node in load(tmp_path / "m.onnx").graph.node]
    assert ("IsNaN" in nodes) is guarded, nodes
    assert nodes.count("Gemm") == 2, nodes  # linear layers hold their bias
    if kind == "of x":  # and is read when the network runs
        x[0, 2:, 0] = 11.0
        (told,) = run(tmp_path / "m.onnx", inputs=x.numpy())
        with torch.no_grad():
            np.testing.assert_allclose(told, model(x).numpy(), rtol=1e-4, atol=1e-5)


class Biased(Attends):
    """Attention to whose scores a weight is added, as T5 and Swin add one for each distance."""

    def __init__(self):
        super().__init__("of weights")
        self.near = nn.Parameter(torch.randn(1, 2, 6, 6))

    def mask(self, x):
        return 2 * self.near


def test_a_mask_of_attention_that_is_learned_is_exported(tmp_path):
    assert export(Biased().eval(), torch.randn(4, 6, 8), tmp_path / "m.onnx").difference < 1e-5


def test_half_precision_is_compared_as_coarsely_as_it_rounds(tmp_path):
    model, x = convolutional().half().eval(), torch.randn(16, 1, 6, 6).half()
    assert 1e-4 < export(model, x, tmp_path / "m.onnx").difference < 4e-3
    with torch.no_grad():
        model[-1].bias += 0.02
    with pytest.raises(NotExported, match=r"differs from torch by .*; 0\.0039 is allowed"):
        verify(tmp_path / "m.onnx", model, x)


class Tokens(nn.Module):
    """Two inputs by keyword, two outputs."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, words, mask):
        h = self.table(words) * mask[..., None]
        return self.head(h.sum(1)), h


def test_keyword_inputs_integers_and_several_outputs(tmp_path):
    model = Tokens().eval()
    inputs = {"words": torch.randint(0, 7, (6, 5)), "mask": torch.rand(6, 5)}
    checked = export(model, inputs, tmp_path / "m.onnx")
    assert [name for name, _, _ in checked.inputs] == ["words", "mask"]
    assert checked.outputs == ("outputs_0", "outputs_1")
    told = run(tmp_path / "m.onnx", **{k: v[:2].numpy() for k, v in inputs.items()})
    with torch.no_grad():
        ours = model(**{k: v[:2] for k, v in inputs.items()})
    for a, b in zip(told, ours):
        np.testing.assert_allclose(a, b.numpy(), rtol=1e-4, atol=1e-5)


class Parts(nn.Module):
    """A dict of outputs, one named as a weight, one as an operation inside, one that is no tensor."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = self.head(x)
        return {"linear": h.relu(), "head.weight": h + 1, "cache": None, "logits": h}


def test_outputs_in_a_dict_keep_their_keys(tmp_path):
    model, x = Parts().eval(), torch.randn(6, 4)
    assert export(model, x, tmp_path / "m.onnx").outputs == ("linear", "head.weight", "logits")
    with torch.no_grad():
        ours = model(x)
    for name, told in zip(("linear", "head.weight", "logits"), run(tmp_path / "m.onnx", inputs=x.numpy())):
        np.testing.assert_allclose(told, ours[name].numpy(), rtol=1e-4, atol=1e-5)


def test_an_output_with_the_name_of_an_input_is_numbered(tmp_path):
    class Same(Parts):
        def forward(self, x):
            return {"x": self.head(x)}

    assert export(Same().eval(), {"x": torch.randn(6, 4)}, tmp_path / "m.onnx").outputs == ("outputs",)


class Wrong(nn.Module):
    """Does in eval mode of a trace something else than afterwards."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x):
        return self.layer(x) + (0.0 if torch.compiler.is_compiling() else 1.0)


def test_a_file_names_no_place_of_this_machine(tmp_path):
    export(espalier.models.MLP(8, (6, 5), 3), torch.randn(4, 8), tmp_path / "m.onnx")
    assert b".py" not in (tmp_path / "m.onnx").read_bytes()


def test_a_file_that_computes_something_else_is_not_kept(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"an older one")
    with pytest.raises(NotExported, match="1 real examples it differs"):
        export(Wrong(), torch.randn(4, 3), tmp_path / "m.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_bytes() == b"an older one"


class Branch(nn.Module):
    """Its shapes depend on values, which cannot be exported."""

    def forward(self, x):
        return x if float(x.sum()) > 0 else x * 2


class Decides(Branch):
    def forward(self, x):
        return x if x.sum() > 0 else x * 2


def test_what_torch_cannot_export_is_one_line(tmp_path, capfd):
    place = r"by the values in a tensor, .* return x if .* > 0 else x \* 2"
    for model in (Branch(), Decides()):
        with pytest.raises(NotExported, match=place) as caught:
            export(model, torch.randn(4, 3), tmp_path / "m.onnx")
        assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_what_is_no_onnx_file(tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"not one")
    with pytest.raises(NotExported, match="cannot load"):
        verify(tmp_path / "m.onnx", nn.Linear(3, 2), torch.randn(4, 3))


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(espalier.BadInput, match=r"onnxscript: pip install 'espalier\[onnx\]'"):
        export(nn.Linear(3, 2), torch.randn(4, 3), tmp_path / "m.onnx")


def test_differences_are_never_hidden_by_what_is_not_finite():
    nan, inf = float("nan"), float("inf")

    def t(*values):
        return [torch.tensor(values)]

    assert distance(t(1.0, nan), t(1.0, nan)) == 0
    assert distance(t(1.0, nan), t(1.0, 2.0)) == inf
    assert distance(t(1.0, inf), t(1.0, -inf)) == inf
    assert distance(t(1.5, inf), t(1.0, inf)) == pytest.approx(1 / 3)
    assert distance(t(1.0), t(1.0, 2.0)) == inf
    assert distance([], t(1.0)) == inf


def test_inputs_to_try():
    x = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(repeated(x, 5), x[[0, 1, 2, 0, 1]])
    drawn = random_like({"words": torch.tensor([[2, 5]]), "on": torch.tensor([True]), "x": x.double()}, 400)
    assert set(drawn["words"].unique().tolist()) == {2, 3, 4, 5}
    assert drawn["on"].dtype == torch.bool
    assert drawn["x"].shape == (400, 2)
    assert drawn["x"].dtype == torch.float64
    assert drawn["x"].mean().item() == pytest.approx(2.5, abs=0.3)
