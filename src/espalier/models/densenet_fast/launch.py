"""The fast step's operations on a GPU: how the kernels are cut up and launched.

``tuned`` is what was measured (docs/performance.md).
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from espalier.models.densenet_fast import kernels
from espalier.models.densenet_fast.chunks import EPS, LANES, Operations, Room

TILE = 256  # pixels of a program that passes values on; of one that averages windows, 64 windows


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut up: pixels of a tile or side by side in a strip, chunks at a time, warps, stages of its
    pipeline. Of weights alone: splits of the pixels of all groups together. Of layers alone: rows of a strip, 2 or 4.
    """

    tile: int = 128
    many: int = 4
    warps: int = 4
    stages: int = 3
    splits: int = 8
    rows: int = 2


def tuned(operation: str, size: int) -> Tuning:
    """For bfloat16 and images of size x size pixels: fast on an H200 with eight runs and with one; nothing spills."""
    return {
        "layer": Tuning(64, many=1, stages=5),
        "source": Tuning(64, many=1, warps=2, stages=2 if size > 8 else 1),
        "input": Tuning(128, many=2, stages=1),
        "weights": Tuning(64, many=4, stages=1, splits=32 if size > 8 else 8),
    }[operation]


def careful(operation: str, size: int) -> Tuning:
    """Small enough for products of float32 without tensor cores, which take many registers."""
    warps = 8 if operation in ("layer", "weights") else 4
    return Tuning(max(32, size), many=1, warps=warps, stages=2, splits=2 * size)


@dataclass(frozen=True)
class Lists:
    by_consumer: Tensor  # (G, K, C) int32
    consumer_count: Tensor  # (G, K)
    by_chunk: Tensor  # (G, C, K)
    chunk_count: Tensor  # (G, C)
    arrived: Tensor  # (G, C): tiles whose sums are in


@dataclass(frozen=True)
class Opened:
    """What a block's consumers would read if every gate were open, which the slopes of closed ones ask for."""

    by_consumer: Tensor  # (G, K, C) int32: all chunks
    consumer_count: Tensor  # (G, K)
    gates: Tensor  # (G, K, C): 1
    scale: Tensor  # (G, K, slots)
    shift: Tensor  # (G, K, slots)
    pooled: Tensor  # (G, P / pool^2, slots)

    @classmethod
    def of(cls, room: Room) -> Opened:
        gates, first = room.gates, room.block.first
        order = torch.arange(gates.shape[2], dtype=torch.int32, device=gates.device).expand_as(gates)
        count = first + torch.arange(gates.shape[1], dtype=torch.int32, device=gates.device).expand(gates.shape[:2])
        gamma, beta = (_for_each(t, 0, room.samples) for t in (room.gamma, room.beta))
        scale = gamma * room.rstd[:, None]
        shift = beta - scale * room.mean[:, None]
        return cls(
            order.contiguous(), count.contiguous(), torch.ones_like(gates), scale, shift, torch.empty_like(room.pooled)
        )


@dataclass(eq=False)
class TritonOperations(Operations):
    """See ``Operations`` in ``chunks.py``. precision: of products of float32, "ieee" or "tf32".

    Slopes come by way of the parameters: with every gate taken as open, gamma's and beta's gradients, times gamma and
    beta, add up to those of the gates. The tail's are what it mixes times what is asked of that.
    """

    precision: str = "ieee"
    tuning: Callable[[str, int], Tuning] = tuned

    def begin(self, room: Room, masks: Tensor, gamma: Tensor, beta: Tensor) -> None:
        room.gamma, room.beta, room.opened = gamma, beta, None
        groups, consumers, chunks = room.gates.shape
        if room.lists is None:

            def ints(*shape: int) -> Tensor:
                return torch.zeros(groups, *shape, dtype=torch.int32, device=masks.device)

            room.lists = Lists(
                ints(consumers, chunks), ints(consumers), ints(chunks, consumers), ints(chunks), ints(chunks)
            )
        lists, block = room.lists, room.block
        kernels.begin[(consumers + chunks, groups)](
            masks, room.bits, gamma, beta, room.gates, room.gain, room.offset, lists.by_consumer, lists.consumer_count,
            lists.by_chunk, lists.chunk_count, room.sums, room.totals, lists.arrived, masks.shape[1], consumers, chunks,
            room.samples, gamma.stride(0), triton.next_power_of_2(max(consumers, chunks)),
            triton.next_power_of_2(block.slots),
        )  # fmt: skip

    def enter(self, room: Room, row: Tensor) -> None:
        block = room.block
        kernels.enter[(triton.cdiv(room.pixels, TILE), block.first, room.groups)](
            row, room.x, room.sums, room.lists.arrived, room.mean, room.rstd, room.gain, room.offset, room.scale,
            room.shift, block.inputs, block.consumers, block.chunks, room.groups // len(row), room.pixels, block.size,
            block.size, TILE, EPS, triton.next_power_of_2(block.consumers),
        )  # fmt: skip

    def layer(self, room: Room, layer: int) -> None:
        block, tuning, lists = room.block, self.tuning("layer", room.block.size), room.lists
        size, rows = block.size, min(tuning.rows, block.size)
        images, wide = room.pixels // size**2, max(tuning.tile, size)
        strips = triton.cdiv(images, wide // size) * (size // rows)
        kernels.layer[(strips, room.groups)](
            room.x, room.forward, room.scale, room.shift, lists.by_consumer, lists.consumer_count, room.sums,
            lists.arrived, room.mean, room.rstd, room.gain, room.offset, layer, block.first, block.consumers,
            block.chunks, room.samples, images, room.pixels, room.forward.stride(0), size, size,
            wide, rows, self.precision, EPS, triton.next_power_of_2(block.consumers),
            num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip

    def pool(self, room: Room) -> None:
        block, small, tile = room.block, room.pooled.shape[1], TILE // 4
        read: Room | Opened = room
        if room.slopes is not None:
            read = room.opened = Opened.of(room)
        kernels.pool[(triton.cdiv(small, tile), block.chunks, room.groups)](
            room.x, read.scale, read.shift, read.pooled, block.consumers, block.slots, room.pixels, small, block.size,
            block.size, block.pool, tile, num_warps=2,
        )  # fmt: skip
        if room.slopes is not None:
            torch.mul(read.pooled, _for_each(room.gates[:, -1], 1, LANES).unsqueeze(1), out=room.pooled)

    def source(self, room: Room, first: int, last: int) -> None:
        block, lists, several = room.block, room.lists, last - first > 1
        tuning = self.tuning("input" if several else "source", block.size)
        many = tuning.many if several else 1
        programs = triton.cdiv(room.pixels, tuning.tile), triton.cdiv(last - first, many), room.groups
        kernels.source[programs](
            room.x, room.out, room.backward, room.pooled_grad, room.gain, room.offset, room.mean, room.rstd,
            lists.by_chunk, lists.chunk_count, room.gates, room.grad, room.totals,
            room.gamma_grad, room.beta_grad, room.gamma_grad.stride(0), first, last, block.consumers, block.chunks,
            room.samples, room.pixels, framed(room), room.pooled.shape[1], room.backward.stride(0),
            block.size, block.size, block.pool, tuning.tile, many, self.precision,
            room.pixels % tuning.tile == 0, num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip

    def finish(self, room: Room, layer: int) -> None:
        self._finish(room, room.out[layer], room.block.first + layer, 1, True)

    def leave(self, room: Room) -> None:
        self._finish(room, room.row, 0, room.block.first, False)

    def _finish(self, room: Room, target: Tensor, first: int, count: int, frame: bool) -> None:
        block = room.block
        kernels.finish[(triton.cdiv(room.pixels, TILE), count, room.groups)](
            room.x, room.grad, room.mean, room.rstd, room.totals, target, first, block.slots, block.inputs, room.pixels,
            framed(room), block.size, block.size, frame, TILE,
        )  # fmt: skip

    def convolutions(self, room: Room) -> None:
        block, tuning = room.block, self.tuning("weights", room.block.size)
        # With slopes the sums are those of each group with every gate open, else of each run with those that are.
        sloped = room.slopes is not None
        read, lists, samples = (room.opened, room.opened, 1) if sloped else (room, room.lists, room.samples)
        quads = triton.cdiv(block.chunks - 1, tuning.many)
        splits = max(tuning.splits // room.groups, 1)
        per_split = triton.cdiv(triton.cdiv(room.pixels, splits), tuning.tile) * tuning.tile
        whole = tuning.tile % block.size == 0 and block.size**2 % tuning.tile == 0
        sums = torch.zeros(2, room.groups // samples, *room.weights.shape[1:], device=room.weights.device)
        kernels.weights[(triton.cdiv(room.pixels, per_split), block.layers * quads, room.groups)](
            room.x, room.out, read.scale, read.shift, room.mean, room.rstd, read.gates, lists.by_consumer,
            lists.consumer_count, sums, block.consumers, block.chunks, samples, room.groups, room.pixels,
            framed(room), per_split, sums.stride(1), sums.stride(0), block.size, block.size, tuning.tile, tuning.many,
            self.precision, whole, num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        kernels.settle[(block.chunks - 1, block.layers, room.groups // room.samples)](
            sums, room.backward, room.gamma, room.beta, room.gates, room.weights, room.gamma_grad, room.beta_grad,
            room.slopes if sloped else room.gates, block.first, block.consumers, block.chunks, room.samples,
            sums.stride(0), sums.stride(1), room.gamma.stride(0), room.backward.stride(0), room.weights.stride(0),
            sloped,
        )  # fmt: skip
        if room.slopes is not None:
            asked = room.opened.pooled.to(room.slopes.dtype) * room.pooled_grad
            room.slopes[:, -1] = asked.sum(1).unflatten(-1, (block.chunks, LANES)).sum(-1)


def _for_each(t: Tensor, dim: int, times: int) -> Tensor:
    """Every index of a dimension so many times, without a look at the device, which a CUDA graph forbids."""
    return t.unsqueeze(dim + 1).expand(*t.shape[: dim + 1], times, *t.shape[dim + 1 :]).flatten(dim, dim + 1)


def framed(room: Room) -> int:
    """Pixels of a group with the frames of its images."""
    return room.out[0, 0].numel() // 16
