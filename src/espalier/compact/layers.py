"""The few plain layers a compact model may hold beside torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Select(nn.Module):
    """Some indices of one dimension, in order. Those that lie together are not gathered: they are a view on a GPU, and
    on a CPU, or where ``contiguous`` is asked for, a copy of it, which is one chunk of memory."""

    index: Tensor

    def __init__(self, index: Sequence[int], dim: int, contiguous: bool = False) -> None:
        super().__init__()
        self.dim, self.contiguous = dim, contiguous
        self.run = run(index)
        self.register_buffer("index", torch.tensor(list(index), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.run is None:
            return x.index_select(self.dim, self.index)
        view = x.narrow(self.dim, *self.run)
        # on a CPU BatchNorm of a view takes longer than the copy and BatchNorm of that
        return view.contiguous() if self.contiguous or x.device.type == "cpu" else view

    def extra_repr(self) -> str:
        return f"{len(self.index)} indices, dim={self.dim}"


def run(index: Sequence[int]) -> tuple[int, int] | None:
    """Where a row of indices that lie together starts, and how many there are; None of others."""
    first = index[0] if len(index) else 0
    return (first, len(index)) if list(index) == list(range(first, first + len(index))) else None


class Fill(nn.Module):
    """The input's slices put at their places in a wider dimension, zeros elsewhere.

    index: for each place of the wider dimension where it comes from; the input's length stands for zero.
    """

    index: Tensor

    def __init__(self, index: Sequence[int], dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("index", torch.tensor(list(index), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[self.dim] = 1
        return torch.cat([x, x.new_zeros(shape)], self.dim).index_select(self.dim, self.index)

    def extra_repr(self) -> str:
        return f"{len(self.index)} indices, dim={self.dim}"


class Pass(nn.Module):
    """What stands for a closed block: its first argument; in a tuple of this length, with None beside it, if not 0.
    ``empty``: zeros like it, where the block lies in a closed residual branch."""

    def __init__(self, length: int = 0, empty: bool = False) -> None:
        super().__init__()
        self.length, self.empty = length, empty

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else next(iter(kwargs.values()))
        given = torch.zeros_like(given) if self.empty else given
        return (given, *[None] * (self.length - 1)) if self.length else given


class Constant(nn.Module):
    """What stands for a layer that reads nothing: its bias at every place. Or for one whose output nothing reads: zeros
    of a given width, or with no channels at all.

    ``dim`` -1: the last dimension gets the width (a linear layer). ``dim`` 1: channels; ``reach`` then gives the
    output's extent, see :func:`reached`. ``lookup``: of an embedding, which adds a dimension of floating-point numbers.
    ``length``: of a tuple that it gives, with None beside the zeros, as attention does; 0: it gives a tensor.
    """

    weight = None  # code may look at the weight's type, as that of T5 does

    def __init__(
        self,
        bias: nn.Parameter | None,
        width: int,
        dim: int = -1,
        reach: Sequence[Sequence[int]] = (),
        lookup: bool = False,
        length: int = 0,
    ) -> None:
        super().__init__()
        self.width, self.dim, self.lookup, self.length = width, dim, lookup, length
        self.reach = tuple(tuple(r) for r in reach)
        self.bias = bias

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y = self._of(args[0] if args else next(iter(kwargs.values())))
        return (y, *[None] * (self.length - 1)) if self.length else y

    def _of(self, x: Tensor) -> Tensor:
        if self.lookup:
            return torch.zeros(*x.shape, self.width, device=x.device)
        shape = reached(x, self.width, self.dim, self.reach)
        if self.bias is None:
            return x.new_zeros(shape)
        return self.bias.reshape(-1, *(1,) * len(self.reach)).expand(shape)

    def extra_repr(self) -> str:
        return f"width={self.width}, dim={self.dim}"


def reached(x: Tensor, width: int, dim: int, reach: Sequence[Sequence[int]]) -> list[int]:
    """The shape that a layer of this width gives for an input. ``reach``, per spatial dimension: kernel, stride,
    padding, dilation, and for a transposed convolution its output padding."""
    shape = list(x.shape)
    shape[dim] = width
    for axis, (kernel, stride, padding, dilation, *more) in enumerate(reach):
        place = len(shape) - len(reach) + axis
        if more:
            shape[place] = (shape[place] - 1) * stride - 2 * padding + dilation * (kernel - 1) + more[0] + 1
        else:
            shape[place] = (shape[place] + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    return shape


def is_attention(module: nn.Module) -> bool:
    """Whether a module is torch's own attention, which :class:`Attention` may stand for."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


class Attention(nn.Module):
    """What a cut leaves of ``nn.MultiheadAttention``: its projections, however wide they are now, and
    ``scaled_dot_product_attention`` over the heads left. Arguments, results and names of parameters are the same.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    _qkv_same_embed_dim = False  # nn.TransformerEncoderLayer then calls this module, and not a kernel for the whole one

    def __init__(self, module: nn.MultiheadAttention, heads: int) -> None:
        """module: with its tensors cut; they are used, not copied. heads: those left."""
        super().__init__()
        held: dict[str, Any] = vars(module) | module._parameters  # an absent one may be a plain None
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"):
            self.register_parameter(name, held[name])
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, held[name])
        self.out_proj = module.out_proj
        self.num_heads, self.head_dim = heads, module.head_dim
        self.batch_first, self.dropout, self.add_zero_attn = module.batch_first, module.dropout, module.add_zero_attn

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:  # as nn.TransformerEncoder packs a padded batch in eval mode
            return self._nested(query), None
        packed = self.in_proj_weight is not None and query is key and key is value
        first = self.batch_first or query.ndim == 2
        query, key, value = (x if first else x.transpose(0, 1) for x in (query, key, value))
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = self._projected(query, key, value, packed)
        if is_causal and key_padding_mask is None and not need_weights:
            attn_mask = None
        else:
            is_causal = False
        more = 0  # keys beyond those given
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(len(x), -1, -1)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
            more += 1
        q, k, v = (x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for x in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
            more += 1
        mask = self._mask(attn_mask, key_padding_mask, q, more)
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
            weights = F.softmax(scores if mask is None else scores + mask, -1)
            weights = F.dropout(weights, dropout) if dropout else weights
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal) if self.num_heads else q
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        return (out.squeeze(0) if not batched else out if first else out.transpose(0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, packed: bool) -> Sequence[Tensor]:
        bias = self.in_proj_bias
        if packed:
            assert self.in_proj_weight is not None
            return F.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        if self.in_proj_weight is not None:
            each: Sequence[Any] = self.in_proj_weight.chunk(3)
        else:
            each = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases: Sequence[Tensor | None] = [None] * 3 if bias is None else bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), each, biases)]

    def _mask(self, attn: Tensor | None, padding: Tensor | None, q: Tensor, more: int) -> Tensor | None:
        """Both masks as numbers added to the scores ``(batch, heads, queries, keys)``; ``more`` keys are open."""
        total: Tensor | None = None
        if attn is not None:
            attn = _added(attn, q)
            total = attn if attn.ndim == 2 else attn.reshape(len(q), self.num_heads, *attn.shape[1:])
        if padding is not None:
            padding = _added(padding, q)[:, None, None]
            total = padding if total is None else total + padding
        return total if total is None or not more else F.pad(total, (0, more))

    def _nested(self, x: Tensor) -> Tensor:
        lengths = [len(part) for part in x.unbind()]
        padded = x.to_padded_tensor(0.0)
        places = torch.arange(padded.shape[1], device=padded.device)
        padding = places >= torch.tensor(lengths, device=padded.device)[:, None]
        out, _ = self(padded, padded, padded, key_padding_mask=padding, need_weights=False)
        return torch.nested.as_nested_tensor([row[:length] for row, length in zip(out, lengths)])

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, head_dim={self.head_dim}"


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of booleans (True: not attended to) as numbers to add; numbers as they are."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
