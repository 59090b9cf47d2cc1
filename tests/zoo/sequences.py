"""Recurrent networks and transformers of the zoo, written out in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolutional import BRANCHES
from .entry import Entry


def tokens(batch: int, length: int, vocabulary: int = 50):
    return lambda: torch.randint(0, vocabulary, (batch, length))


def series(batch: int, length: int, width: int = 32):
    return lambda: torch.randn(batch, length, width, dtype=torch.float64)


class Recurrent(nn.Module):
    """Embedding, a stock recurrent layer, and a head that reads its last output."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 2, both_ways: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.rnn = kind(24, 32, layers, batch_first=True, bidirectional=both_ways)
        self.head = nn.Linear(64 if both_ways else 32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        output, _ = self.rnn(self.embedding(ids))
        return self.head(output[:, -1])


class CellByHand(nn.Module):
    """An LSTM cell stepped by a Python loop, its four gates cut out of one projection by `chunk`."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(50, 24)
        self.read, self.recur = nn.Linear(24, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        h = c = x.new_zeros(x.shape[0], self.width)
        for step in range(x.shape[1]):
            i, f, g, o = (self.read(x[:, step]) + self.recur(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.head(h)


class Block(nn.Module):
    """A pre-norm transformer block with fused query, key and value."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder whose output layer is its own token embedding."""

    def __init__(self, vocabulary: int = 50, width: int = 32, heads: int = 4, layers: int = 2, context: int = 32):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class PlainViT(nn.Module):
    """Patches by a strided convolution, a class token, blocks without a causal mask, einsum attention."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        x = x + self.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))
        h = self.norm2(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return self.head(self.norm3(x)[:, 0])


class Encoder(nn.Module):
    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 96, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Embedded(nn.Module):
    """Tokens embedded, and an encoder of torch with a norm at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(50, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 96, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.token(ids))[:, 0])


class Grouped(nn.Module):
    """One layer after Llama: root-mean-square norms, four queries to two keys, a gated feed-forward part."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(50, width)
        self.norm1, self.norm2, self.norm3 = nn.RMSNorm(width), nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, 8 * heads, bias=False) for heads in (4, 2, 2))
        self.out = nn.Linear(32, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)
        self.head = nn.Linear(width, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids)
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        h = self.norm2(x)
        return self.head(self.norm3(x + self.down(F.silu(self.gate(h)) * self.up(h))))


class Attention(nn.Module):
    """nn.MultiheadAttention between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(32, 48)
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True)
        self.hidden, self.head = nn.Linear(48, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.head(F.relu(self.hidden(x)))


WIDTH = ("units", "channels", "heads", "width")
IDS = (tokens(2, 6), tokens(3, 9))
ENTRIES = [
    Entry("LSTM", "rnn", lambda: Recurrent(nn.LSTM), tokens(3, 6), IDS, source="torch"),
    Entry("LSTM, both ways", "rnn", lambda: Recurrent(nn.LSTM, 1, True), tokens(3, 6), IDS, source="torch"),
    Entry("LSTM cell by hand", "rnn", CellByHand, tokens(3, 6), IDS),
    Entry("GRU", "rnn", lambda: Recurrent(nn.GRU), tokens(3, 6), IDS, source="torch"),
    Entry("small GPT, tied embeddings", "transformer", GPT, tokens(2, 7), IDS, (r"^token",)),
    Entry("small GPT, branches too", "transformer", GPT, tokens(2, 7), IDS, (r"^token",), kinds=BRANCHES),
    Entry("small GPT, every kind", "transformer", GPT, tokens(2, 7), IDS, kinds=(*WIDTH, "branches", "blocks")),
    Entry(
        "nn.TransformerEncoder, width and blocks too",
        "transformer",
        Embedded,
        tokens(2, 7),
        IDS,
        kinds=(*WIDTH, "blocks"),
        source="torch",
    ),
    Entry("grouped queries, width too", "transformer", Grouped, tokens(2, 7), IDS, kinds=WIDTH),
    Entry(
        "ViT by hand, gated FFN",
        "transformer",
        PlainViT,
        lambda: torch.randn(2, 3, 16, 16, dtype=torch.float64),
        (lambda: torch.randn(3, 3, 12, 20, dtype=torch.float64),),
        ("^patch", "^head"),
    ),
    Entry(
        "nn.TransformerEncoder",
        "transformer",
        Encoder,
        series(2, 7),
        (series(3, 5),),
        ("^head",),
        source="torch",
    ),
    Entry(
        "nn.TransformerEncoder, norm first",
        "transformer",
        lambda: Encoder(True),
        series(2, 7),
        (series(3, 5),),
        ("^head",),
        source="torch",
    ),
    Entry(
        "nn.MultiheadAttention",
        "transformer",
        Attention,
        series(2, 7),
        (series(3, 5),),
        ("^head",),
        source="torch",
    ),
]
