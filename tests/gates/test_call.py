"""gated.call: pure, and clean to trace."""

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

import espalier
from espalier.models import MLP, DenseNet


def several_runs(gated, masks_dims=0):
    def loss(params, mask, x, y):
        return F.cross_entropy(gated.call(params, mask, x), y)

    def over_masks(params, masks, x, y):
        return vmap(loss, in_dims=(None, 0, None, None))(params, masks, x, y).mean()

    return vmap(grad(over_masks), in_dims=(0, 0, None, None))


MODELS = {
    "placed": lambda: MLP(6, (5, 4), 3),
    "found": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)),
    "indexed": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)),
}


def setting(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    gated = espalier.attach(model, x)
    runs, samples = 2, 3
    params = {n: torch.stack([p.detach() * s for s in (1.0, 0.5)]) for n, p in model.named_parameters()}
    masks = (torch.rand(runs, samples, gated.d) < 0.6).float()
    return model, gated, params, masks, x, y


@pytest.mark.parametrize("name", MODELS)
def test_runs_of_gradients_over_masks_equal_plain_autograd(name):
    model, gated, params, masks, x, y = setting(name)
    gradients = several_runs(gated)(params, masks, x, y)
    for run in range(2):
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(params[n][run])
        model.zero_grad()
        for mask in masks[run]:
            with gated.masked(mask):
                (F.cross_entropy(model(x), y) / 3).backward()
        for n, p in model.named_parameters():
            assert torch.allclose(gradients[n][run], p.grad, atol=1e-6), n


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.inner = nn.Conv2d(6, 5, 3, padding=1)
        self.inner_norm = nn.BatchNorm2d(5)
        self.outer = nn.Conv2d(5, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.outer(F.relu(self.inner_norm(self.inner(x))))
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


EXACT = {
    "mlp": (lambda: MLP(7, (6, 5), 4), (8, 7)),
    "found gates": (lambda: nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4)), (8, 7)),
    "residual": (Residual, (8, 3, 5, 5)),
    "connections": (lambda: DenseNet(depth=10, growth=3, classes=4, stem=4), (8, 3, 8, 8)),
    "masked weights": (Recurrent, (4, 6, 3)),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("case", EXACT)
def test_call_equals_masked(case, train):
    """Losses and gradients, in both modes; what BatchNorm counts goes into the tensors given, not into the model."""
    torch.manual_seed(0)
    make, shape = EXACT[case]
    model = make().double().train(train)
    x, y = torch.randn(shape, dtype=torch.float64), torch.randint(4, (shape[0],))
    gated = espalier.attach(model, x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters, losses = list(model.parameters()), []
    for mask in (torch.rand(3, gated.d) < 0.6).double():
        tensors = {**dict(model.named_parameters()), **{n: b.clone() for n, b in model.named_buffers()}}
        called = F.cross_entropy(gated.call(tensors, mask, x), y)
        gradients = torch.autograd.grad(called, parameters)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), f"{name} changed"
        with gated.masked(mask):
            masked = F.cross_entropy(model(x), y)
            expected = torch.autograd.grad(masked, parameters)
        assert torch.allclose(called, masked, rtol=1e-12)
        for a, b in zip(gradients, expected):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-14)
        model.load_state_dict(before)
        losses.append(called.item())
    assert len(set(losses)) == 3


@pytest.mark.parametrize("name", ["placed", "found"])
def test_compiles_as_one_graph(name):
    _, gated, params, masks, x, y = setting(name)
    step = several_runs(gated)
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    expected, got = step(params, masks, x, y), compiled(params, masks, x, y)
    for n in params:
        assert torch.allclose(expected[n], got[n], atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_call_touches_no_numpy(name, monkeypatch):
    _, gated, params, masks, x, _ = setting(name)
    one = {n: p[0] for n, p in params.items()}
    expected = gated.call(one, masks[0, 0], x)

    def refuse(*args, **kwargs):
        raise AssertionError("NumPy on the path of gated.call")

    for function in (
        "array_equal",
        "arange",
        "where",
        "asarray",
        "array",
        "concatenate",
        "flatnonzero",
        "broadcast_to",
    ):
        monkeypatch.setattr(np, function, refuse)
    assert torch.equal(gated.call(one, masks[0, 0], x), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_new_mask_does_not_recompile(name):
    model, gated, _, masks, x, _ = setting(name)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter)
    outs = []
    for mask in masks.reshape(-1, gated.d):
        with gated.masked(mask):
            outs.append(compiled(x))
            assert torch.allclose(outs[-1], model(x), atol=1e-6)
    assert counter.frame_count == 1
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("name", ["found", "indexed"])
def test_open_gates_leave_what_is_read_alone_and_a_call_still_brings_its_mask(name):
    model, gated, _, masks, x, _ = setting(name)
    twin = MODELS[name]()
    twin.load_state_dict(model.state_dict())
    read = []
    last = model[-1]
    with gated.masked(torch.ones(gated.d)):
        handle = last.register_forward_hook(lambda module, args, output: read.append(args[0]))
        given = []
        model[-2].register_forward_hook(lambda module, args, output: given.append(output))
        assert torch.equal(model(x), twin(x))
    handle.remove()
    assert read[0] is given[0]  # no product with ones
    own = {n: p.detach() for n, p in model.named_parameters()}
    with gated.masked(masks[0, 0]):
        expected = model(x)
    called = gated.call(own, masks[0, 0], x)  # while no mask is set
    torch.testing.assert_close(called, expected)
    assert not torch.equal(called, twin(x))
    assert torch.equal(model.double()(x.double()), twin.double()(x.double()))  # buffers are other tensors now
