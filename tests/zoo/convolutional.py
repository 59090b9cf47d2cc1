"""Convolutional networks and MLPs of the zoo, written out in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .entry import Entry


def images(batch: int, size: int, channels: int = 3, dims: int = 2):
    return lambda: torch.randn(batch, channels, *[size] * dims, dtype=torch.float64)


def rows(batch: int, features: int = 20):
    return lambda: torch.randn(batch, features, dtype=torch.float64)


def conv_bn(cin: int, cout: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(cout), nn.ReLU()
    )


def mlp(widths: Sequence[int] = (20, 64, 48, 32, 10)) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def vgg_bn() -> nn.Sequential:
    layers: list[nn.Module] = []
    cin = 3
    for width, count in ((16, 1), (32, 2), (48, 2)):
        for _ in range(count):
            layers += [nn.Conv2d(cin, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            cin = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(cin * 4, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, *head)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; the shortcut is a projection, or zero padding as in the CIFAR networks of the original."""

    def __init__(self, cin: int, cout: int, stride: int, padded: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.shortcut: nn.Module | None = None
        self.stride, self.extra = stride, cout - cin
        if (stride != 1 or cin != cout) and not padded:
            self.shortcut = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.extra:
            half = self.extra // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.extra - half))
        return F.relu(x + y)


def resnet(blocks: int = 3, widths: Sequence[int] = (16, 32, 64), padded: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [conv_bn(3, widths[0])]
    cin = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(BasicBlock(cin, width, 2 if stage and not block else 1, padded))
            cin = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 10))


class WideBlock(nn.Module):
    """Pre-activation block of WideResNet: BN and ReLU come before the convolution that reads them."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(cin), nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(cout), nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.dropout = nn.Dropout(0.3)
        self.project = nn.Conv2d(cin, cout, 1, stride, bias=False) if stride != 1 or cin != cout else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(x))
        y = self.conv2(self.dropout(F.relu(self.bn2(self.conv1(h)))))
        return y + (x if self.project is None else self.project(h))


def wide_resnet() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    cin = 16
    for width, stride in ((32, 1), (64, 2), (128, 2)):
        layers += [WideBlock(cin, width, stride), WideBlock(width, width, 1)]
        cin = width
    tail = [nn.BatchNorm2d(cin), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 10)]
    return nn.Sequential(*layers, *tail)


class DenseLayer(nn.Module):
    def __init__(self, cin: int, growth: int) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(cin), nn.Conv2d(cin, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.bn(x)))], 1)


def densenet(depth: int = 40, growth: int = 12) -> nn.Sequential:
    cin, per_block = 16, (depth - 4) // 3
    layers: list[nn.Module] = [nn.Conv2d(3, cin, 3, padding=1, bias=False)]
    for block in range(3):
        for _ in range(per_block):
            layers.append(DenseLayer(cin, growth))
            cin += growth
        if block < 2:
            layers += [nn.BatchNorm2d(cin), nn.ReLU(), nn.Conv2d(cin, cin, 1, bias=False), nn.AvgPool2d(2)]
    tail = [nn.BatchNorm2d(cin), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 10)]
    return nn.Sequential(*layers, *tail)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.up(F.relu(self.down(scale))))


class InvertedResidual(nn.Module):
    def __init__(self, cin: int, cout: int, expand: int, stride: int) -> None:
        super().__init__()
        inner = cin * expand
        self.expand = nn.Sequential(nn.Conv2d(cin, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish())
        self.depthwise = nn.Sequential(
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.Hardswish()
        )
        self.squeeze = SqueezeExcite(inner, max(8, inner // 4))
        self.project = nn.Sequential(nn.Conv2d(inner, cout, 1, bias=False), nn.BatchNorm2d(cout))
        self.residual = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.squeeze(self.depthwise(self.expand(x))))
        return x + y if self.residual else y


def mobilenet_se() -> nn.Sequential:
    return nn.Sequential(
        conv_bn(3, 16, stride=2),
        InvertedResidual(16, 16, 2, 1),
        InvertedResidual(16, 24, 4, 2),
        InvertedResidual(24, 24, 4, 1),
        InvertedResidual(24, 40, 4, 2),
        InvertedResidual(40, 40, 4, 1),
        conv_bn(40, 128, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.Hardswish(),
        nn.Linear(64, 10),
    )


class UNet(nn.Module):
    """Three levels; skips are concatenated, the way up is a transposed convolution."""

    def __init__(self, widths: Sequence[int] = (24, 48, 96)) -> None:
        super().__init__()
        a, b, c = widths
        self.down1 = nn.Sequential(conv_bn(3, a), conv_bn(a, a))
        self.down2 = nn.Sequential(conv_bn(a, b), conv_bn(b, b))
        self.bottom = nn.Sequential(conv_bn(b, c), conv_bn(c, c))
        self.up2, self.up1 = nn.ConvTranspose2d(c, b, 2, 2), nn.ConvTranspose2d(b, a, 2, 2)
        self.join2 = nn.Sequential(conv_bn(2 * b, b), conv_bn(b, b))
        self.join1 = nn.Sequential(conv_bn(2 * a, a), conv_bn(a, a))
        self.head = nn.Conv2d(a, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        low = self.bottom(F.max_pool2d(two, 2))
        two = self.join2(torch.cat([self.up2(low), two], 1))
        return self.head(self.join1(torch.cat([self.up1(two), one], 1)))


class InceptionBlock(nn.Module):
    def __init__(self, cin: int, widths: Sequence[int]) -> None:
        super().__init__()
        one, three, five, pool = widths
        self.one = conv_bn(cin, one, 1)
        self.three = nn.Sequential(conv_bn(cin, three // 2, 1), conv_bn(three // 2, three))
        self.five = nn.Sequential(conv_bn(cin, five // 2, 1), conv_bn(five // 2, five), conv_bn(five, five))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_bn(cin, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


def inception() -> nn.Sequential:
    return nn.Sequential(
        conv_bn(3, 24, stride=2),
        InceptionBlock(24, (16, 32, 16, 16)),
        nn.MaxPool2d(2),
        InceptionBlock(80, (32, 48, 24, 24)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def shuffle(x: Tensor, groups: int) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


class ShuffleOne(nn.Module):
    """ShuffleNet's first unit: grouped 1x1 convolutions with a channel shuffle between them."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.squeeze = conv_bn(channels, channels, 1, groups=groups)
        self.depth = nn.Sequential(
            nn.Conv2d(channels, channels, 3, 1, 1, groups=channels, bias=False), nn.BatchNorm2d(channels)
        )
        self.expand = nn.Sequential(
            nn.Conv2d(channels, channels, 1, groups=groups, bias=False), nn.BatchNorm2d(channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.expand(self.depth(shuffle(self.squeeze(x), self.groups))))


class ShuffleTwo(nn.Module):
    """ShuffleNet's second unit: half of the channels pass by, then the halves are shuffled."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.branch = nn.Sequential(
            conv_bn(half, half, 1),
            nn.Conv2d(half, half, 3, 1, 1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            conv_bn(half, half, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        return shuffle(torch.cat([left, self.branch(right)], 1), 2)


def shufflenet() -> nn.Sequential:
    return nn.Sequential(
        conv_bn(3, 24),
        ShuffleOne(24, 3),
        conv_bn(24, 32, stride=2),
        ShuffleTwo(32),
        ShuffleTwo(32),
        conv_bn(32, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def conv1d() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(2, 32, 5, 2, 2),
        nn.GELU(),
        nn.Conv1d(32, 64, 3, padding=2, dilation=2),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.ConvTranspose1d(64, 32, 4, 2, 1),
        nn.Tanh(),
        nn.Conv1d(32, 2, 3, padding=1),
    )


def conv3d() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(1, 24, 3, padding=1),
        nn.BatchNorm3d(24),
        nn.SiLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(24, 24, 3, padding=1, groups=24),
        nn.Conv3d(24, 32, 1),
        nn.PReLU(32),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


SIZES = (images(3, 8), images(2, 12))
BRANCHES = ("units", "channels", "heads", "branches")
ENTRIES = [
    Entry("MLP", "mlp", mlp, rows(4), (rows(7),)),
    Entry("VGG-BN", "cnn", vgg_bn, images(4, 16), (images(3, 16), images(2, 24))),
    Entry("ResNet-20", "cnn", resnet, images(4, 8), SIZES),
    Entry("ResNet-20, zero-padded shortcuts", "cnn", lambda: resnet(padded=True), images(4, 8), SIZES),
    Entry("WideResNet", "cnn", wide_resnet, images(4, 8), SIZES),
    Entry("DenseNet-40", "cnn", densenet, images(3, 8), SIZES),
    Entry("MobileNet with squeeze-excite", "cnn", mobilenet_se, images(4, 16), (images(3, 16), images(2, 24))),
    Entry("U-Net", "cnn", UNet, images(2, 8), (images(3, 8), images(2, 12))),
    Entry("Inception-like", "cnn", inception, images(4, 8), SIZES),
    Entry("ShuffleNet-like", "cnn", shufflenet, images(4, 8), SIZES),
    Entry("MLP, inputs too", "mlp", mlp, rows(4), (rows(7),), kinds=("units", "inputs")),
    Entry("ResNet-20, branches too", "cnn", resnet, images(4, 8), SIZES, kinds=BRANCHES),
    Entry("ResNet-20, blocks too", "cnn", resnet, images(4, 8), SIZES, kinds=(*BRANCHES[:3], "blocks")),
    Entry("Conv1d and transposed", "cnn", conv1d, images(3, 16, 2, 1), (images(2, 24, 2, 1),)),
    Entry("Conv3d, depthwise", "cnn", conv3d, images(3, 4, 1, 3), (images(2, 6, 1, 3),)),
]
