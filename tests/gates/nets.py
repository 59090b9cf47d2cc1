"""Small networks, each with one way in which layers are coupled."""

import torch
import torch.nn.functional as F
from torch import nn


class ByHand(nn.Module):
    """A root-mean-square norm as Transformers write it; ``plus``: with a scale around zero."""

    def __init__(self, width: int, plus: float = 0.0):
        super().__init__()
        self.weight, self.variance_epsilon, self.plus = nn.Parameter(torch.randn(width)), 1e-6, plus

    def forward(self, x):
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.plus + self.weight) * scaled


class Residual(nn.Module):
    """Channels coupled by an addition, a depthwise convolution and squeeze-excite inside."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.inner = nn.Conv2d(6, 8, 1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.squeeze, self.excite = nn.Linear(8, 3), nn.Linear(3, 8)
        self.outer = nn.Conv2d(8, 6, 1)
        self.outer_norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        h = F.silu(self.deep(F.relu(self.inner(x))))
        h = h * torch.sigmoid(self.excite(F.relu(self.squeeze(h.mean((2, 3))))))[:, :, None, None]
        return self.head(F.adaptive_avg_pool2d(x + self.outer_norm(self.outer(h)), 1).flatten(1))


class Joined(nn.Module):
    """Concatenation, then flattening into a linear layer."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 3, 3), nn.Conv2d(2, 5, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 9, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(torch.cat([self.left(x), self.right(x)], 1))).flatten(1))


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 12, 3, padding=1)
        self.groups = nn.Conv2d(12, 8, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x):
        return self.head(F.relu(self.up(F.relu(self.groups(F.relu(self.first(x)))))))


class Attention(nn.Module):
    """Pre-norm attention with grouped queries (4 query heads on 2 key heads) and a gated feed-forward layer."""

    def __init__(self, width=16, heads=4, key_heads=2, inner=10):
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, key_heads * self.size), nn.Linear(width, key_heads * self.size)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * inner), nn.Linear(inner, width)
        self.repeat = heads // key_heads

    def forward(self, x):
        batch, time, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(batch, time, -1, self.size).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.repeat, 1) for t in (k, v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, -1)
        x = x + self.out(h)
        gate, value = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class Fused(nn.Module):
    """Attention by hand with fused projections and integers that must follow the cut."""

    def __init__(self, width=12, heads=3):
        super().__init__()
        self.heads, self.split_size = heads, width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(x).split(self.split_size, dim=2)
        q, k, v = (t.view(batch, time, self.heads, width // 3).transpose(1, 2) for t in (q, k, v))
        weights = torch.softmax(q @ k.transpose(2, 3) / 2.0, -1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, time, self.split_size))


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(3, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Tied(nn.Module):
    """A table that is looked up, and read again as the output layer; raw parameters in between."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.into, self.back = nn.Parameter(torch.randn(6, 7)), nn.Parameter(torch.randn(7, 6))

    def forward(self, tokens):
        return F.linear(torch.relu(self.table(tokens) @ self.into) @ self.back, self.table.weight)


class Stepped(nn.Module):
    """A recurrent cell stepped by hand, from a state whose width is an attribute of ours."""

    def __init__(self, cell=nn.GRUCell):
        super().__init__()
        self.cell, self.head, self.width = cell(3, 6), nn.Linear(6, 4), 6

    def forward(self, x):
        state = torch.zeros(x.shape[0], self.width, dtype=x.dtype)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class Shuffled(nn.Module):
    """Channel and pixel shuffles between convolutions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 8, 3), nn.Conv2d(8, 12, 3)
        self.third, self.last = nn.Conv2d(3, 5, 3), nn.Conv2d(20, 2, 1)

    def forward(self, x):
        x = F.relu(self.second(F.channel_shuffle(F.relu(self.first(x)), 2)))
        return self.last(F.pixel_unshuffle(F.relu(self.third(F.pixel_shuffle(x, 2))), 2))


class SplitBlock(nn.Module):
    """A half that goes on and a half that goes around, split by an integer; the hidden layer is as wide as it says."""

    def __init__(self, into, width):
        super().__init__()
        self.width = width
        self.wide, self.back = nn.Conv2d(into, 2 * width, 1), nn.Conv2d(3 * width, into, 1)
        self.inner, self.outer = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)

    def forward(self, x):
        left, right = self.wide(x).split((self.width, self.width), 1)
        return self.back(torch.cat([left, right, right + self.outer(F.relu(self.inner(right)))], 1))


NETS = {
    "split": (lambda: nn.Sequential(SplitBlock(2, 4), SplitBlock(2, 3)), lambda: torch.randn(2, 2, 5, 5)),
    "residual": (Residual, lambda: torch.randn(4, 3, 6, 6)),
    "joined": (Joined, lambda: torch.randn(4, 2, 5, 5)),
    "grouped": (Grouped, lambda: torch.randn(4, 2, 5, 5)),
    "attention": (Attention, lambda: torch.randn(2, 5, 16)),
    "fused": (Fused, lambda: torch.randn(2, 5, 12)),
    "lstm": (Recurrent, lambda: torch.randn(3, 5, 3)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: torch.randn(3, 5, 3)),
    "cell": (Stepped, lambda: torch.randn(3, 5, 3)),
    "shuffled": (Shuffled, lambda: torch.randn(2, 2, 8, 8)),
    "tied": (Tied, lambda: torch.randint(11, (3, 5))),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 8), nn.GELU(), nn.Linear(8, 3)
        ),
        lambda: torch.randn(6, 7),
    ),
}


def small_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
