"""The fast step's operations on a GPU with leaner kernels: how those are cut up and launched.

``tuned`` is what was measured (docs/performance.md).
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from espalier.models.densenet_fast import kernels_bf16 as kernels
from espalier.models.densenet_fast.chunks import EPS, Block, Room
from espalier.models.densenet_fast.launch_generic import TritonOperations, Tuning, framed


def tuned(operation: str, size: int) -> Tuning:
    """For bfloat16 and images of size x size pixels: fast on an H200 with eight runs and with one; nothing spills."""
    return {
        "layer": Tuning(64, many=1, stages=5, rows=2),
        "source": Tuning(64, many=1, warps=2, stages=2 if size > 8 else 1),
        "input": Tuning(128, many=2, stages=1),
        "weights": Tuning(64, many=4, stages=1, splits=32 if size > 8 else 8),
    }[operation]


def careful(operation: str, size: int) -> Tuning:
    """Small enough for products of float32 without tensor cores, which take many registers."""
    warps, rows = 8 if operation in ("layer", "weights") else 4, 2 if operation == "layer" else 1
    return Tuning(max(32, size), many=1, warps=warps, stages=2, splits=2 * size, rows=rows)


@dataclass(eq=False)
class LeanOperations:
    """See :class:`espalier.models.densenet_fast.chunks.Operations`.

    usual: does what is not done here, and says in which precision float32 is multiplied.
    """

    usual: TritonOperations
    tuning: Callable[[str, int], Tuning] = tuned
    affine: dict[Block, tuple[Tensor, Tensor]] = field(default_factory=dict)  # gamma and beta of the present call

    def begin(self, room: Room, masks: Tensor, gamma: Tensor, beta: Tensor) -> None:
        self.affine[room.block] = gamma, beta
        self.usual.begin(room, masks, gamma, beta)

    def enter(self, room: Room, row: Tensor) -> None:
        self.usual.enter(room, row)

    def pool(self, room: Room) -> None:
        self.usual.pool(room)

    def finish(self, room: Room, layer: int) -> None:
        self.usual.finish(room, layer)

    def leave(self, room: Room) -> None:
        self.usual.leave(room)

    def layer(self, room: Room, layer: int) -> None:
        block, tuning, lists = room.block, self.tuning("layer", room.block.size), room.lists
        size, rows = block.size, min(tuning.rows, block.size)
        if rows == 1:
            return self.usual.layer(room, layer)
        images, wide = room.pixels // size**2, max(tuning.tile, size)
        strips = triton.cdiv(images, wide // size) * (size // rows)
        kernels.layer[(strips, room.groups)](
            room.x, room.forward, room.scale, room.shift, lists.by_consumer, lists.consumer_count, room.sums,
            lists.arrived, room.mean, room.rstd, room.gain, room.offset, layer, block.first, block.consumers,
            block.chunks, room.samples, images, room.pixels, room.forward.stride(0), size, size,
            wide, rows, self.usual.precision, EPS, triton.next_power_of_2(block.consumers),
            num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip

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
            block.size, block.size, block.pool, tuning.tile, many, self.usual.precision,
            room.pixels % tuning.tile == 0, num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip

    def convolutions(self, room: Room) -> None:
        block, lists, tuning = room.block, room.lists, self.tuning("weights", room.block.size)
        quads = triton.cdiv(block.chunks - 1, tuning.many)
        splits = max(tuning.splits // room.groups, 1)
        per_split = triton.cdiv(triton.cdiv(room.pixels, splits), tuning.tile) * tuning.tile
        whole = tuning.tile % block.size == 0 and block.size**2 % tuning.tile == 0
        sums = torch.zeros(2, *room.weights.shape, device=room.weights.device)
        kernels.weights[(triton.cdiv(room.pixels, per_split), block.layers * quads, room.groups)](
            room.x, room.out, room.scale, room.shift, room.mean, room.rstd, room.gates, lists.by_consumer,
            lists.consumer_count, sums, block.consumers, block.chunks, room.samples, room.groups, room.pixels,
            framed(room), per_split, sums.stride(1), sums.stride(0), block.size, block.size, tuning.tile, tuning.many,
            self.usual.precision, whole, num_warps=tuning.warps, num_stages=tuning.stages,
        )  # fmt: skip
        gamma, beta = self.affine[block]
        kernels.settle[(block.chunks - 1, block.layers, room.groups // room.samples)](
            sums, room.backward, gamma, beta, room.weights, room.gamma_grad, room.beta_grad, block.first,
            block.consumers, block.chunks, sums.stride(0), sums.stride(1), gamma.stride(0), room.backward.stride(0),
            room.weights.stride(0),
        )  # fmt: skip
