"""Data from a DataLoader, with augmentation that is drawn anew in every epoch. CPU, seconds."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import espalier


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Images, each moved by up to one pixel in both directions."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return self.images[index].roll((down, right), (-2, -1)), self.labels[index]


torch.manual_seed(0)
data = espalier.data.load("digits").as_floats()
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
)  # fmt: skip
loader = DataLoader(Shifted(*data.train), 64, shuffle=True, drop_last=True)
result = espalier.fit(model, loader, epochs=10, target=0.3, validation=data.test, quiet=True)
print(f"weights kept: {result.shares['cost_share']:.1%}, error {result.validation.error:.2%}")
