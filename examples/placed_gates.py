"""Gates placed by hand: which of four branches of different filters a network needs. CPU, seconds."""

import torch
from torch import Tensor, nn

import espalier


class Branches(nn.Module):
    """Four convolutions side by side. One gate opens or closes all eight channels of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(1, 8, size, padding=size // 2) for size in (1, 3, 5, 7))
        self.gate = espalier.Gate([8, 8, 8, 8])
        self.answer = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(4 * 32, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.answer(self.gate(torch.relu(torch.cat([branch(images) for branch in self.branches], 1))))


torch.manual_seed(0)
data = espalier.data.load("digits")
model = Branches()
result = espalier.fit(model, data, epochs=12, cost="units", target=0.5, quiet=True)
kept = [size for size, open_gate in zip((1, 3, 5, 7), result.mask.tolist()) if open_gate]
print(f"filters kept: {kept}, error {result.validation.error:.2%}")
before, after = (sum(p.numel() for p in network.parameters()) for network in (model, result.model))
print(f"parameters: {after:,} of {before:,}")
