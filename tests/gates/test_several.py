"""Several masks at once: three ways, same losses and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.gates.several import by_vmap, grouped, sequential
from espalier.models import MLP, DenseNet


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


CASES = {
    "mlp": (lambda: MLP(7, (6, 5), 4), (8, 7)),
    "found gates": (lambda: nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4)), (8, 7)),
    "residual": (Residual, (8, 3, 5, 5)),
    "connections": (lambda: DenseNet(depth=10, growth=3, classes=4, stem=4), (8, 3, 8, 8)),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_three_ways_agree(case, train):
    torch.manual_seed(0)
    make, shape = CASES[case]
    model = make().double().train(train)
    x, y = torch.randn(shape, dtype=torch.float64), torch.randint(4, (shape[0],))
    gated = espalier.attach(model, x)
    masks = (torch.rand(3, gated.d) < 0.6).double()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def losses_and_gradients(way):
        out = way(gated, tensors, masks, x)
        assert out.shape == (3, shape[0], 4)
        losses = torch.stack([F.cross_entropy(o, y) for o in out])
        return losses, torch.autograd.grad(losses.mean(), list(model.parameters()))

    reference, slopes = losses_and_gradients(sequential)
    for i, mask in enumerate(masks):
        with gated.masked(mask):
            assert torch.allclose(F.cross_entropy(model(x), y), reference[i], rtol=1e-12)
        model.load_state_dict(before)
    assert len(set(reference.tolist())) == 3
    for way in (by_vmap, grouped):
        losses, gradients = losses_and_gradients(way)
        assert torch.allclose(losses, reference, rtol=1e-12)
        for a, b in zip(gradients, slopes):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-14)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} changed"


def test_a_masked_weight_is_refused_by_name_when_grouped():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    model = Recurrent()
    x = torch.randn(4, 6, 3)
    gated = espalier.attach(model, x)
    tensors = dict(model.named_parameters())
    masks = (torch.rand(2, gated.d) < 0.6).float()
    with pytest.raises(espalier.BadInput, match="weight"):
        grouped(gated, tensors, masks, x)
    out = sequential(gated, tensors, masks, x)
    for mask, one in zip(masks, out):
        with gated.masked(mask):
            assert torch.allclose(model(x), one)
