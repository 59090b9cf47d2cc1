"""Mixtures of experts: rows sent to one of several matrices, by one kernel for all of them or expert by expert."""

import pytest
import torch
from torch import Tensor, nn

import espalier


class Experts(nn.Module):
    """Every row goes to the expert that its router likes most; the units of all experts are cut alike."""

    def __init__(self, units: int, by_kernel: bool) -> None:
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 5)
        self.up = nn.Parameter(torch.randn(3, units, 8) / 3)
        self.down = nn.Parameter(torch.randn(3, 8, units) / 3)
        self.by_kernel = by_kernel

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        chosen = self.router(x).argmax(-1)
        if not self.by_kernel:
            out = torch.zeros_like(x)
            for expert in range(3):
                rows = (chosen == expert).nonzero().reshape(-1)
                inner = torch.relu(nn.functional.linear(x[rows], self.up[expert]))
                out.index_add_(0, rows, nn.functional.linear(inner, self.down[expert]))
            return self.head(x + out)
        order = chosen.argsort()
        ends = torch.stack([(chosen <= expert).sum() for expert in range(3)]).int()
        inner = torch.relu(torch._grouped_mm(x[order], self.up.transpose(1, 2), offs=ends))
        out = torch._grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        return self.head(x + out[order.argsort()])


def build(by_kernel: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    return Experts(16, by_kernel).eval(), torch.randn(12, 6)


# The kernel takes rows of 16 bytes, eight numbers in half precision: units go by eights. The stem's would be one gate.
@pytest.mark.parametrize(("by_kernel", "gates"), [(False, [8, 16]), (True, [2])])
def test_units_of_experts_are_gated(by_kernel, gates):
    model, x = build(by_kernel)
    gated = espalier.attach(model, x)
    assert sorted(group.size for group in gated.structure.groups) == gates
    assert not gated.structure.trace.unknown
    generator = torch.Generator().manual_seed(1)
    for share in (0.8, 0.5, 0.2, 0.0):
        mask = gated.canonical((torch.rand(gated.d, generator=generator) < share).float())
        small = gated.compact(mask)
        with gated.masked(mask), torch.no_grad():
            torch.testing.assert_close(small(x), model(x))
        if by_kernel:
            small.to(torch.bfloat16)(x.bfloat16())
        kept = small.up.numel() + small.down.numel() + sum(m.weight.numel() for m in (small.stem, small.head))
        assert float(gated.cost("weights")(mask)) == kept + small.router.weight.numel()


@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_are_counted_once_for_all_experts(by_kernel):
    gated = espalier.attach(*build(by_kernel))
    counted = 12 * (6 * 8 + 8 * 3 + 8 * 5 + 2 * 8 * 16)
    assert float(gated.cost("macs")(torch.ones(gated.d))) == pytest.approx(counted, rel=1e-12)


class Kinds(nn.Module):
    """A layer for each kind of row; the first example may hold none of a kind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(7, 2)
        self.kinds = nn.ModuleList(nn.Linear(8, 7) for _ in range(3))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head(torch.cat([layer(x[kind == i]) for i, layer in enumerate(self.kinds)]).relu())


def test_a_layer_that_got_no_rows_has_its_weights_counted():
    model, inputs = Kinds(), (torch.randn(5, 6), torch.tensor([0, 0, 2, 2, 2]))
    gated = espalier.attach(model, inputs)
    for mask in (torch.ones(gated.d), gated.canonical((torch.arange(gated.d) % 3 > 0).float())):
        small = gated.compact(mask)
        kept = sum(m.weight.numel() for m in small.modules() if isinstance(m, nn.Linear))
        assert float(gated.cost("weights")(mask)) == kept
        at_rows = sum(m.weight.numel() * n for m, n in zip((small.stem, *small.kinds, small.head), (5, 2, 0, 3, 5)))
        assert float(gated.cost("macs")(mask)) == at_rows
