"""A dense block in chunks of 16 channels, and what the fast step does to them, as torch has it.

Activations lie as ``(chunks, groups, pixels, 16)``; a layer's 12 channels are one chunk, padded with zeros. A group is
one mask of one run: G = R * S. The operations here work on any device in any precision; ``launch.py`` has the same
ones for CUDA.
"""

# mypy: disable-error-code="no-untyped-call"
# (torch does not say what Tensor.unflatten and Tensor.split take)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16  # channels of a chunk
EPS = 1e-5  # of BatchNorm


@dataclass(frozen=True)
class Block:
    """The shape of one dense block and of its tail, the transition or the classifier, which reads all of it.

    size: height and width of its images; inputs: channels of its input; outputs: channels (or classes) behind the tail;
    pool: the tail averages its normalised input over windows of pool x pool pixels before it mixes channels. The
    readable version averages afterwards; both are linear.
    """

    size: int
    inputs: int
    growth: int
    layers: int
    outputs: int
    pool: int

    @property
    def first(self) -> int:
        """Chunks of the input."""
        return -(-self.inputs // LANES)

    @property
    def chunks(self) -> int:
        return self.first + self.layers

    @property
    def slots(self) -> int:
        return self.chunks * LANES

    @property
    def consumers(self) -> int:
        return self.layers + 1

    def channels(self, consumer: int) -> Tensor:
        """The slot of each channel that a consumer reads, ``(width)``."""
        source = torch.arange(consumer) * LANES + self.first * LANES
        own = source.unsqueeze(1) + torch.arange(self.growth)
        return torch.cat([torch.arange(self.inputs), own.flatten()])


class Room:
    """Tensors of one block, kept from call to call; what is of the present call alone is named first.

    R: runs, C: chunks, G: groups, P: pixels of a group, K: consumers, L: layers.
    """

    gamma: Tensor  # (R, K, slots)
    beta: Tensor  # (R, K, slots)
    forward: Tensor  # (R, L, 3 rows, C, 16 in, 3 columns + 1, 16 out): convolutions
    backward: Tensor  # (R, L, C, 9 mirrored, 16 out, 16 in): the same
    weights: Tensor  # (R, L, C, 16 in, 9 mirrored, 16 out): their gradient
    gamma_grad: Tensor  # (R, K, slots)
    beta_grad: Tensor  # (R, K, slots)
    pooled_grad: Tensor  # like pooled
    slopes: Tensor | None  # (G, K, C): of a group's loss by a consumer's gate for a chunk, where asked for
    lists: Any = None  # what the kernels keep: which gates are open
    opened: Any = None  # and what consumers would read if all were, where slopes are asked for

    def __init__(
        self,
        block: Block,
        samples: int,
        groups: int,
        images: int,
        bits: Tensor,
        narrow: torch.dtype,
        wide: torch.dtype,
        mixed: torch.dtype,
    ) -> None:
        """narrow: what activations are kept in. wide: statistics and sums. mixed: what the tail mixes."""

        def zeros(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=bits.device)

        self.block, self.samples, self.groups, self.pixels = block, samples, groups, images * block.size**2
        chunks, consumers, slots, framed = block.chunks, block.consumers, block.slots, block.size + 2
        # the sources, between two rows of NaN, which ReLU turns into 0
        self.x = zeros(chunks, groups, images, framed, block.size, LANES, dtype=narrow).fill_(torch.nan)
        self.sums = zeros(2, groups, slots, dtype=torch.float64)  # of a source's values and of their squares
        self.mean, self.rstd = zeros(groups, slots), zeros(groups, slots)
        # of each consumer, statistics, gamma and gate in one
        self.scale, self.shift = zeros(groups, consumers, slots), zeros(groups, consumers, slots)
        self.pooled = zeros(groups, self.pixels // block.pool**2, slots, dtype=mixed)  # what the tail mixes
        self.grad = zeros(chunks, groups, self.pixels, LANES)  # with respect to a source's normalised values
        self.totals = zeros(2, groups, slots)  # sums over pixels of grad and of grad * normalised
        # with respect to the layers' outputs, in a frame of zeros; and to the block's input
        self.out = zeros(block.layers, groups, images, framed, framed, LANES, dtype=narrow)
        self.row = zeros(groups, self.pixels, block.inputs, dtype=narrow)
        self.bits = bits  # (K, C) int32: which bit of the mask is the gate of a consumer for a chunk, d for none
        self.gates = zeros(groups, consumers, chunks)
        self.gain, self.offset = zeros(groups, consumers, slots), zeros(groups, consumers, slots)  # gamma, beta * gate

    @property
    def inner(self) -> Tensor:
        """The sources alone, ``(C, G, B, size, size, 16)``."""
        return self.x[:, :, :, 1:-1]


class Operations:
    """What is done to the chunks of a block; each writes into its room. This is the obvious version."""

    def begin(self, room: Room, masks: Tensor, gamma: Tensor, beta: Tensor) -> None:
        """``gates``, ``gain`` and ``offset``. masks: ``(G, d)``; gamma, beta: ``(R, K, slots)``, which are kept."""
        room.gamma, room.beta = gamma, beta
        room.gates.copy_(F.pad(masks, (0, 1))[:, room.bits.long()])
        gate = room.gates.repeat_interleave(LANES, -1)
        room.gain.copy_(gamma.repeat_interleave(room.samples, 0) * gate)
        room.offset.copy_(beta.repeat_interleave(room.samples, 0) * gate)

    def enter(self, room: Room, row: Tensor) -> None:
        """The block's input ``(R or G, P, inputs)`` as chunks, with its statistics; a run's input is all its masks'."""
        block, groups = room.block, room.groups
        row = row.repeat_interleave(groups // len(row), 0)
        padded = F.pad(row, (0, block.first * LANES - block.inputs))
        inner = room.inner[: block.first]
        inner.copy_(padded.unflatten(-1, (block.first, LANES)).permute(2, 0, 1, 3).reshape(inner.shape))
        self._normalise(room, 0, block.first)

    def _normalise(self, room: Room, first: int, last: int) -> None:
        where = slice(first * LANES, last * LANES)
        x = room.inner[first:last].flatten(2, 4).to(room.sums.dtype)
        room.sums[0, :, where] = x.sum(2).transpose(0, 1).flatten(1)
        room.sums[1, :, where] = x.square().sum(2).transpose(0, 1).flatten(1)
        mean, square = room.sums[..., where] / room.pixels
        room.mean[:, where] = mean
        room.rstd[:, where] = (square - mean**2 + EPS).rsqrt()
        scale = room.gain[..., where] * room.rstd[:, None, where]
        room.scale[..., where] = scale
        room.shift[..., where] = room.offset[..., where] - scale * room.mean[:, None, where]

    def _read(self, room: Room, consumer: int, chunks: int) -> Tensor:
        """What a consumer reads, ``(chunks, G, P, 16)``."""
        scale, shift = (
            t[:, consumer, : chunks * LANES].unflatten(-1, (chunks, 1, LANES)).transpose(0, 1)
            for t in (room.scale, room.shift)
        )
        read: Tensor = (room.inner[:chunks].flatten(2, 4).to(scale.dtype) * scale + shift).relu()
        return read

    def layer(self, room: Room, layer: int) -> None:
        """The output of one layer as a chunk, with its statistics."""
        chunks = room.block.first + layer
        read = _images(room, self._read(room, layer, chunks).to(room.x.dtype))
        u = _columns(F.pad(read, (0, 0, 1, 1, 1, 1)))
        w = room.forward[:, layer, :, :chunks, :, :3].repeat_interleave(room.samples, 0)
        output = torch.einsum("yxcgpi,gycixo->gpo", u.unflatten(0, (3, 3)), w)
        room.inner[chunks].copy_(output.reshape(room.inner[chunks].shape))
        self._normalise(room, chunks, chunks + 1)

    def pool(self, room: Room) -> None:
        u = _images(room, self._read(room, room.block.layers, room.block.chunks))  # (C, G, B, H, W, 16)
        pool = room.block.pool
        u = u.unflatten(4, (-1, pool)).unflatten(3, (-1, pool)).mean((4, 6))
        room.pooled.copy_(u.permute(1, 2, 3, 4, 0, 5).reshape(room.pooled.shape))

    def source(self, room: Room, first: int, last: int) -> None:
        """``grad`` and ``totals`` of these chunks, all of one source, from what all consumers behind it ask; and what
        the consumers' ``gamma_grad`` and ``beta_grad`` find here, added to them. ``slopes``: what is asked of a
        consumer's input, times what this would be with the gate open."""
        block, pool = room.block, room.block.pool
        wide, small = room.grad.dtype, block.size // room.block.pool
        room.grad[first:last] = 0
        for j in range(first, last):
            where = slice(j * LANES, (j + 1) * LANES)
            x = room.inner[j].flatten(1, 3).to(wide)  # (G, P, 16)
            normal = (x - room.mean[:, None, where]) * room.rstd[:, None, where]
            for k in range(max(j - block.first + 1, 0), block.consumers):
                if k == block.layers:
                    asked = room.pooled_grad[..., where].to(wide).unflatten(1, (-1, small, 1, small, 1)) / pool**2
                    asked = asked.expand(-1, -1, small, pool, small, pool, -1).reshape(x.shape)
                else:
                    dy = _columns(room.out[k].unsqueeze(0))[:, 0]  # (9, G, P, 16)
                    w = room.backward[:, k, j].repeat_interleave(room.samples, 0)
                    asked = torch.einsum("tgpo,gtoi->gpi", dy, w).to(wide)
                passed = torch.where(x * room.scale[:, k, None, where] + room.shift[:, k, None, where] > 0, asked, 0.0)
                if room.slopes is not None:
                    gamma, beta = (
                        t[:, k, None, where].repeat_interleave(room.samples, 0) for t in (room.gamma, room.beta)
                    )
                    room.slopes[:, k, j] = (asked * (normal * gamma + beta).relu()).sum((1, 2))
                gate = room.gates[:, k, j, None]
                for part, term in ((room.beta_grad, passed), (room.gamma_grad, passed * normal)):
                    part[:, k, where] += (term.sum(1) * gate).unflatten(0, (-1, room.samples)).sum(1)
                room.grad[j] += passed * room.gain[:, k, None, where]
            room.totals[0, :, where] = room.grad[j].sum(1)
            room.totals[1, :, where] = (room.grad[j] * normal).sum(1)

    def _through(self, room: Room, j: int) -> Tensor:
        """The gradient with respect to a chunk from the one with respect to its normalised values, ``(G, P, 16)``."""
        where = slice(j * LANES, (j + 1) * LANES)
        rstd = room.rstd[:, None, where]
        normal = (room.inner[j].flatten(1, 3).to(room.grad.dtype) - room.mean[:, None, where]) * rstd
        mean, slope = room.totals[:, :, None, where] / room.pixels
        gradient: Tensor = rstd * (room.grad[j] - mean - normal * slope)
        return gradient

    def finish(self, room: Room, layer: int) -> None:
        """Through the normalisation of a layer's output: ``out``."""
        inner = room.out[layer, :, :, 1:-1, 1:-1]
        inner.copy_(self._through(room, room.block.first + layer).reshape(inner.shape))

    def leave(self, room: Room) -> None:
        """The same for the block's input: ``row``."""
        rows = torch.cat([self._through(room, j) for j in range(room.block.first)], -1)
        room.row.copy_(rows[..., : room.block.inputs])

    def convolutions(self, room: Room) -> None:
        """``weights``."""
        block = room.block
        for layer in range(block.layers):
            chunks = block.first + layer
            u = self._read(room, layer, chunks).to(room.x.dtype).unflatten(1, (-1, room.samples))
            dy = _columns(room.out[layer].unsqueeze(0))[:, 0].unflatten(1, (-1, room.samples))
            room.weights[:, layer, :chunks] += torch.einsum("crspi,trspo->rcito", u, dy).to(room.weights.dtype)


def _images(room: Room, u: Tensor) -> Tensor:
    """``(C, G, P, 16)`` as ``(C, G, B, H, W, 16)``."""
    images: Tensor = u.unflatten(2, (-1, room.block.size, room.block.size))
    return images


def _columns(u: Tensor) -> Tensor:
    """What a 3 x 3 convolution reads at each pixel: framed ``(C, G, B, H + 2, W + 2, 16)`` to ``(9, C, G, P, 16)``."""
    height, width = u.shape[3] - 2, u.shape[4] - 2
    taps = [u[:, :, :, i : i + height, j : j + width].flatten(2, 4) for i in range(3) for j in range(3)]
    return torch.stack(taps)
