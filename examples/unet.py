"""A U-Net that finds the ink in noisy images, at 30% of its multiplications. CPU, seconds."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier


def double(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = double(1, 16), double(16, 32), double(16 + 32, 16)
        self.answer = nn.Conv2d(16, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        wide = self.down(images)
        deep = F.interpolate(self.middle(F.max_pool2d(wide, 2)), scale_factor=2.0)
        return self.answer(self.up(torch.cat([wide, deep], 1)))


torch.manual_seed(0)
images = espalier.data.load("digits").as_floats().train[0][:1024]
ink = (images > 0.4).float()
noisy = images + 0.3 * torch.randn_like(images)
result = espalier.fit(
    UNet(), (noisy, ink), epochs=8, loss=F.binary_cross_entropy_with_logits, cost="macs", target=0.3,
    validation=0.1, quiet=True,
)  # fmt: skip
with torch.no_grad():
    right = ((result.model(noisy) > 0) == ink.bool()).float().mean()
print(result.table())
print(f"MACs kept: {result.shares['cost_share']:.1%}, pixels right: {right:.1%}")
