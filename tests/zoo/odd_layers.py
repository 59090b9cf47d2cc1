"""Small networks around one unusual layer each: whatever is gated in them must be exact, whatever is not, said so."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolutional import images, rows
from .entry import Entry
from .sequences import series, tokens

Function = Callable[[Tensor], Tensor]


class Around(nn.Module):
    """A stem, a function or layer in the middle, and a head that reads it; a hidden layer of its own can always go."""

    def __init__(self, stem: nn.Module, middle: nn.Module | Function, head: nn.Module) -> None:
        super().__init__()
        self.stem, self.head = stem, head
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.stem(x)))


class Pooled(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(2).mean(-1))


def conv(middle: Callable[[], nn.Module | Function], after: int = 12) -> Callable[[], nn.Module]:
    """A convolution to 12 channels, the middle, then a head that reads `after` channels."""
    return lambda: Around(nn.Conv2d(3, 12, 3, padding=1), middle(), Pooled(after))


def dense(middle: Callable[[], nn.Module | Function], after: int = 16) -> Callable[[], nn.Module]:
    """A layer of 16 units, the middle, then a head that reads `after` features."""
    return lambda: Around(nn.Linear(20, 16), middle(), nn.Sequential(nn.Linear(after, 24), nn.ReLU(), nn.Linear(24, 5)))


class TwiceUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.head(torch.relu(self.again(torch.relu(self.again(x)))))


class TiedAutoencoder(nn.Module):
    """The decoder multiplies with the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(20, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.encoder(x)) @ self.encoder.weight


class Cells(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(50, 12), kind(12, 16), nn.Linear(16, 5)

    def forward(self, ids: Tensor) -> Tensor:
        state = None
        for step in range(ids.shape[1]):
            state = self.cell(self.embedding(ids[:, step]), state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Stacked(nn.Module):
    """A stock recurrent layer that hands on its whole sequence."""

    def __init__(self, layer: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.rnn, self.head = layer, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.hidden, self.head = nn.EmbeddingBag(50, 16), nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(self.bag(ids))))


class Mixer(nn.Module):
    """An MLP over tokens, whose number the example fixes, then one over channels, with a transpose between them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.tokens = nn.Sequential(nn.Linear(7, 24), nn.GELU(), nn.Linear(24, 7))
        self.channels = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).mT).mT
        x = x + self.channels(self.norm2(x))
        return self.head(x.mean(1))


class Several(nn.Module):
    """Returns a mapping of a tensor, a tuple and a number; the hidden features are an output as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(20, 16), nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor):
        features = torch.relu(self.first(x))
        return {"logits": self.head(torch.relu(self.second(features))), "more": (features, 3)}


class Experts(nn.Module):
    """Two experts mixed by a softmax over the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(20, 16), nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        weights = self.router(x).softmax(-1)
        return self.head(sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts)))


class Hyper(nn.Module):
    """One layer writes the weights of another: the product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.writes, self.head = nn.Linear(20, 16), nn.Linear(20, 16 * 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.einsum("bi,bij->bj", torch.relu(self.stem(x)), self.writes(x).view(-1, 16, 8)))


def bottleneck(x: Tensor) -> Tensor:
    return F.pixel_shuffle(x, 2)


def unpool(x: Tensor) -> Tensor:
    pooled, index = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(pooled, index, 2)


IMAGE, ROWS, IDS = images(3, 6), rows(4), tokens(3, 6)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "GroupNorm": (conv(lambda: nn.GroupNorm(3, 12)), IMAGE),
    "InstanceNorm": (conv(lambda: nn.InstanceNorm2d(12, affine=True)), IMAGE),
    "BatchNorm without affine": (conv(lambda: nn.BatchNorm2d(12, affine=False)), IMAGE),
    "BatchNorm without running statistics": (conv(lambda: nn.BatchNorm2d(12, track_running_stats=False)), IMAGE),
    "LocalResponseNorm": (conv(lambda: nn.LocalResponseNorm(3)), IMAGE),
    "L2 normalisation of channels": (conv(lambda: lambda x: F.normalize(x, dim=1)), IMAGE),
    "reflection padding": (conv(lambda: nn.Conv2d(12, 16, 3, padding=1, padding_mode="reflect"), 16), IMAGE),
    "circular padding": (conv(lambda: nn.Conv2d(12, 16, 3, padding=1, padding_mode="circular"), 16), IMAGE),
    "dilated, same padding": (conv(lambda: nn.Conv2d(12, 16, 3, padding="same", dilation=2), 16), IMAGE),
    "constant padding of 1": (conv(lambda: nn.Sequential(nn.ConstantPad2d(1, 1.0), nn.Conv2d(12, 16, 3)), 16), IMAGE),
    "grouped transposed": (conv(lambda: nn.ConvTranspose2d(12, 8, 2, 2, groups=2), 8), IMAGE),
    "depthwise transposed": (conv(lambda: nn.ConvTranspose2d(12, 12, 2, 2, groups=12)), IMAGE),
    "upsampling": (conv(lambda: nn.Upsample(scale_factor=2, mode="bilinear")), IMAGE),
    "pixel shuffle": (conv(lambda: bottleneck, 3), IMAGE),
    "pixel unshuffle": (conv(lambda: nn.PixelUnshuffle(2), 48), IMAGE),
    "max unpooling": (conv(lambda: unpool), IMAGE),
    "adaptive max pooling": (conv(lambda: nn.AdaptiveMaxPool2d(2)), IMAGE),
    "fractional resize": (conv(lambda: lambda x: F.interpolate(x, size=(5, 7), mode="nearest")), IMAGE),
    "channel dropout": (conv(lambda: nn.Dropout2d(0.5)), IMAGE),
    "PReLU of one slope": (conv(lambda: nn.PReLU()), IMAGE),
    "flatten and unflatten the image": (conv(lambda: nn.Sequential(nn.Flatten(2), nn.Unflatten(2, (6, 6)))), IMAGE),
    "cumulative sum over channels": (conv(lambda: lambda x: x.cumsum(1)), IMAGE),
    "roll over channels": (conv(lambda: lambda x: x.roll(1, 1)), IMAGE),
    "flip of channels": (conv(lambda: lambda x: x.flip(1)), IMAGE),
    "max over channels": (conv(lambda: lambda x: x.amax(1, keepdim=True) * x), IMAGE),
    "spectrum of the image": (conv(lambda: lambda x: torch.fft.rfft2(x).abs()), IMAGE),
    "two-fold channels": (conv(lambda: lambda x: x.repeat(1, 2, 1, 1), 24), IMAGE),
    "interleaved channels": (conv(lambda: lambda x: x.repeat_interleave(2, 1), 24), IMAGE),
    "gated linear unit": (dense(lambda: nn.GLU(), 8), ROWS),
    "bilinear layer": (dense(lambda: _Square(), 8), ROWS),
    "softmax over units": (dense(lambda: nn.Softmax(-1)), ROWS),
    "threshold on constants": (dense(lambda: lambda x: torch.where(x > 0, x, torch.full_like(x, 0.2))), ROWS),
    "clamp and constant shift": (dense(lambda: lambda x: x.clamp(-1, 1) + 0.5), ROWS),
    "outer product": (dense(lambda: lambda x: torch.einsum("bi,bj->bij", x, x).flatten(1), 256), ROWS),
    "top four units": (dense(lambda: lambda x: x.topk(4, -1).values, 4), ROWS),
    "indexed by a fixed order": (dense(lambda: _Ordered()), ROWS),
    "weight norm": (lambda: _weight_normed(), ROWS),
    "spectral norm": (lambda: _spectral_normed(), ROWS),
    "frozen first layer": (lambda: _frozen(), ROWS),
    "one layer used twice": (TwiceUsed, ROWS),
    "tied autoencoder": (TiedAutoencoder, ROWS),
    "several outputs": (Several, ROWS),
    "soft experts": (Experts, ROWS),
    "hypernetwork": (Hyper, ROWS),
    "MLP-Mixer": (Mixer, series(2, 7)),
    "embedding bag": (Bag, IDS),
    "LSTM cell": (lambda: Cells(nn.LSTMCell), IDS),
    "GRU cell": (lambda: Cells(nn.GRUCell), IDS),
    "Elman RNN": (lambda: Stacked(nn.RNN(32, 16, 2, batch_first=True), 16), series(2, 5)),
    "LSTM with projection": (lambda: Stacked(nn.LSTM(32, 16, proj_size=8, batch_first=True), 8), series(2, 5)),
    "LSTM, time first": (lambda: Stacked(nn.LSTM(32, 16, 2), 16), series(5, 2)),
    "nn.Transformer decoder": (lambda: _Decoder(), series(2, 6)),
}


class _Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Bilinear(16, 16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, x)


class _Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(16))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order]


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(32, 4, 48, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x, x.flip(1)))


def _weight_normed() -> nn.Module:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(20, 16))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))


def _spectral_normed() -> nn.Module:
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(20, 16))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))


def _frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))
    model[0].requires_grad_(False)
    return model


ODD: list[Entry] = [Entry(name, "cnn", make, example) for name, (make, example) in NETWORKS.items()]
