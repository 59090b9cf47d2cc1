"""The fast step's operations on a GPU: how the kernels are cut up and launched."""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from espalier.models.densenet_fast import kernels_generic as kernels
from espalier.models.densenet_fast.chunks import EPS, Room


@dataclass(frozen=True)
class Tuning:
    """How a kernel is cut up.

    Pixels of a tile or side by side in a strip, chunks at a time, warps, stages of its pipeline. Of weights alone:
    splits of the pixels (of all groups together, in bfloat16). Of layers in bfloat16 alone: rows of a strip, 2 or 4 (1:
    no strips but the usual kernel).
    """

    tile: int = 128
    many: int = 4
    warps: int = 4
    stages: int = 3
    splits: int = 8
    rows: int = 1


def tuned(operation: str, size: int) -> Tuning:
    """For bfloat16 and images of size x size pixels, chosen by counting, not yet by measuring (docs/performance.md)."""
    return {
        "layer": Tuning(max(128, size), 1, 4, 2) if size > 8 else Tuning(64, 1, 4, 2),  # whole rows
        "source": Tuning(32, 1, 1, 1),
        "input": Tuning(32, 4, 4, 1),
        "weights": Tuning(64, 4, 4, 1, splits=max(size // 2, 1)),
        "plain": Tuning(256),
    }[operation]


def careful(operation: str, size: int) -> Tuning:
    """Small enough for products of float32 without tensor cores, which take many registers."""
    return Tuning(tile=max(32, size), many=1, stages=2)


@dataclass(frozen=True)
class Lists:
    by_consumer: Tensor  # (G, K, C) int32
    consumer_count: Tensor  # (G, K)
    by_chunk: Tensor  # (G, C, K)
    chunk_count: Tensor  # (G, C)
    arrived: Tensor  # (G, C): tiles whose sums are in


@dataclass(eq=False)
class TritonOperations:
    """See ``Operations`` in ``chunks.py``. precision: of products of float32, "ieee" or "tf32"."""

    precision: str = "ieee"
    tuning: Callable[[str, int], Tuning] = tuned

    def begin(self, room: Room, masks: Tensor, gamma: Tensor, beta: Tensor) -> None:
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

    def _statistics(self, room: Room) -> tuple[Tensor, ...]:
        return (room.sums, room.lists.arrived, room.mean, room.rstd, room.gain, room.offset)

    def enter(self, room: Room, row: Tensor) -> None:
        block, tile = room.block, self.tuning("plain", room.block.size).tile
        kernels.enter[(triton.cdiv(room.pixels, tile), block.first, room.groups)](
            row, room.x, *self._statistics(room), room.scale, room.shift, block.inputs, block.consumers, block.chunks,
            room.groups // len(row), room.pixels, block.size, block.size, tile, EPS,
            triton.next_power_of_2(block.consumers),
        )  # fmt: skip

    def layer(self, room: Room, layer: int) -> None:
        block, tuning = room.block, self.tuning("layer", room.block.size)
        kernels.layer[(triton.cdiv(room.pixels, tuning.tile), room.groups)](
            room.x, room.forward, room.scale, room.shift, room.lists.by_consumer, room.lists.consumer_count,
            *self._statistics(room), layer, block.first, block.consumers, block.chunks, room.samples, room.pixels,
            room.forward.stride(0), block.size, block.size, tuning.tile, tuning.many, self.precision, EPS,
            triton.next_power_of_2(block.consumers), num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip

    def pool(self, room: Room) -> None:
        block, small, tile = room.block, room.pooled.shape[1], 64
        kernels.pool[(triton.cdiv(small, tile), block.chunks, room.groups)](
            room.x, room.scale, room.shift, room.pooled, block.consumers, block.slots, room.pixels, small, block.size,
            block.size, block.pool, tile, num_warps=2,
        )  # fmt: skip

    def source(self, room: Room, first: int, last: int) -> None:
        block, lists, wide = room.block, room.lists, last - first > 1
        tuning = self.tuning("input" if wide else "source", block.size)
        many = tuning.many if wide else 1
        kernels.source[(triton.cdiv(room.pixels, tuning.tile), triton.cdiv(last - first, many), room.groups)](
            room.x, room.out, room.backward, room.pooled_grad, room.scale, room.shift, room.gain, room.mean, room.rstd,
            lists.by_chunk, lists.chunk_count, room.gates, room.grad, room.totals,
            room.gamma_grad, room.beta_grad, room.gamma_grad.stride(0), first, last, block.consumers, block.chunks,
            room.samples, room.pixels, framed(room), room.pooled.shape[1], room.backward.stride(0),
            block.size, block.size, block.pool, tuning.tile, many, self.precision,
            num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip

    def finish(self, room: Room, layer: int) -> None:
        self._finish(room, room.out[layer], room.block.first + layer, 1, True)

    def leave(self, room: Room) -> None:
        self._finish(room, room.row, 0, room.block.first, False)

    def _finish(self, room: Room, target: Tensor, first: int, count: int, frame: bool) -> None:
        block, tile = room.block, self.tuning("plain", room.block.size).tile
        kernels.finish[(triton.cdiv(room.pixels, tile), count, room.groups)](
            room.x, room.grad, room.mean, room.rstd, room.totals, target, first, block.slots, block.inputs, room.pixels,
            framed(room), block.size, block.size, frame, tile,
        )  # fmt: skip

    def convolutions(self, room: Room) -> None:
        block, tuning = room.block, self.tuning("weights", room.block.size)
        quads = triton.cdiv(block.chunks - 1, tuning.many)
        per_split = triton.cdiv(triton.cdiv(room.pixels, tuning.splits), tuning.tile) * tuning.tile
        kernels.weights[(triton.cdiv(room.pixels, per_split), block.layers * quads, room.groups // room.samples)](
            room.x, room.out, room.scale, room.shift, room.gates, room.weights, block.first, block.consumers,
            block.chunks, room.samples, room.groups, room.pixels, framed(room), per_split, room.weights.stride(0),
            block.size, block.size, tuning.tile, tuning.many, self.precision, room.pixels % tuning.tile == 0,
            num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip


def framed(room: Room) -> int:
    """Pixels of a group with the frames of its images."""
    return room.out[0, 0].numel() // 16
