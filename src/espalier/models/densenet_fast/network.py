"""The gated DenseNet's loss and gradient written out: the numbers of the readable version in few passes over memory.

Three facts make it fast. A source's batch statistics under one mask are the same for all its consumers: they are taken
once. Normalising, scaling, gating and ReLU are one function of a value and two numbers per channel, so no consumer's
input is ever stored: ``m relu(g x + b) = relu((g m) x + b m)``. And backwards a source gathers what all its consumers
ask of it in one pass, because the gradients of later layers are ready when an earlier one needs them.

This file knows the network; what is done to a block's activations is in ``chunks.py`` (torch) and
``launch.py`` (the same for CUDA).
"""

# mypy: disable-error-code="no-untyped-call"
# (torch does not say what Tensor.unflatten and Tensor.split take)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from espalier.gates.gate import Gate
from espalier.models.architectures import DenseNet
from espalier.models.densenet_fast.chunks import LANES, Block, Operations, Room
from espalier.space import BadInput
from espalier.train.batched.chain import Named
from espalier.train.batched.step import Gradient, Sloped

FLAT = "flat"
DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, eq=False)
class Spread:
    """Parts of one tensor ``(R, n)``, each filled from the flat parameters by index; index P reads a zero."""

    index: Tensor
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, parts: list[Tensor]) -> Spread:
        return cls(torch.cat([p.flatten() for p in parts]), tuple(tuple(p.shape) for p in parts))

    def parts(self, values: Tensor) -> list[Tensor]:
        """values: ``(R, n)``. Views of it."""
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        return [v.unflatten(1, shape) for v, shape in zip(values.split(sizes, 1), self.shapes)]

    def read(self, flat: Tensor) -> list[Tensor]:
        """flat: ``(R, P + 1)``, the last column zero."""
        return self.parts(flat.index_select(1, self.index))


class FastDenseNet(Gradient):
    """Loss and gradient of R gated DenseNets under S masks each, with weights ``(R, P)`` in one tensor.

    precision: what activations and convolutions are computed in; weights, statistics and sums are float32 ("float64":
    all of it float64). One call at a time: activations lie where the last call of the same shape had its own.

    >>> fast = FastDenseNet(depth=40, growth=12)
    >>> fast.size, fast.d
    (1019722, 273)
    """

    def __init__(
        self,
        depth: int = 40,
        growth: int = 12,
        classes: int = 10,
        stem: int = 16,
        channels: int = 3,
        precision: str = "bf16",
    ) -> None:
        if precision not in DTYPES:
            raise BadInput(f"precision is one of {', '.join(DTYPES)}, not {precision!r}")
        if growth > LANES:
            raise BadInput(f"the fast step has at most {LANES} channels per layer, not {growth}; use the readable one")
        with torch.random.fork_rng(devices=()):  # its weights are not used
            readable = DenseNet(depth, growth, classes, stem, channels)
        self.precision, self.dtype = precision, DTYPES[precision]
        self.wide = torch.float64 if precision == "float64" else torch.float32
        self.growth, self.classes, self.stem, self.channels = growth, classes, stem, channels
        self.layers = (depth - 4) // 3
        self.shapes = {name: tuple(parameter.shape) for name, parameter in readable.named_parameters()}
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        self.size = sum(sizes)
        self.starts = dict(zip(self.shapes, torch.tensor([0, *sizes]).cumsum(0).tolist()))
        self.d, self.gates = 0, dict[str, int]()  # by name the first bit of a gate
        for name, gate in readable.named_modules():
            if isinstance(gate, Gate):
                self.gates[name], self.d = self.d, self.d + gate.bits
        # of each block the paths of what reads it: its layers, then the transition or the classifier
        tails = [f"transitions.{b}." for b in range(2)] + [""]
        self.readers = [[*(f"blocks.{b}.{i}." for i in range(self.layers)), tail] for b, tail in enumerate(tails)]
        self._rooms: dict[Any, tuple[list[Room], Operations]] = {}
        self._maps: dict[torch.device, tuple[Spread, Spread, Tensor, Spread]] = {}

    # ---- weights in one tensor --------------------------------------------------------------------------------------

    def pack(self, named: Named) -> Named:
        """Tensors ``(R, ...)`` by name as one, ``(R, P)``."""
        if set(named) != set(self.shapes):
            raise BadInput(
                f"these are not the parameters of this DenseNet: {sorted(set(named) ^ set(self.shapes))[:4]}"
            )
        return {FLAT: torch.cat([named[name].flatten(1) for name in self.shapes], 1)}

    def unpack(self, packed: Named) -> Named:
        """Views of the one tensor, by name."""
        flat = packed[FLAT]
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        return {
            name: part.unflatten(1, shape) for (name, shape), part in zip(self.shapes.items(), flat.split(sizes, 1))
        }

    # ---- loss and gradient ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __call__(
        self,
        params: Named,
        fixed: Named,
        masks: Tensor,
        x: Tensor,
        y: Tensor,
        *,
        each: bool = False,
        slopes: bool = False,
    ) -> Sloped:
        """Of each run's mean over its finite cross entropies; the losses and the numbers of wrong classes ``(R, S)``.

        params: packed, or by name; fixed: none; masks: ``(R, S, d)``; x: ``(R, B, channels, H, H)``; y: ``(R, B)``. The
        gradients are as the parameters are. slopes: also those ``(R, S, d)`` of each mask's own loss by its gates,
        closed ones included; each mask then has images of its own, x ``(R, S, B, channels, H, H)`` and y ``(R, S, B)``.
        """
        x, y = (x.flatten(1, 2), y) if slopes else (x, y.unsqueeze(1))
        flat = params[FLAT] if FLAT in params else self.pack(params)[FLAT]
        logits = self._forward(flat, masks, x, slopes)
        chosen = y.unsqueeze(-1) == torch.arange(self.classes, device=y.device)
        logs = torch.log_softmax(logits, -1)
        losses = -torch.where(chosen, logs, 0.0).sum(-1).mean(-1)
        wrong = (logits.argmax(-1) != y).sum(-1)
        finite = losses.isfinite()
        counted = finite.sum(-1, keepdim=True).clamp(min=1)
        share = finite.to(logs.dtype) / (counted * y.shape[-1])
        packed = {FLAT: self._backward((logs.exp() - chosen.to(logs.dtype)) * share[..., None, None])}
        # What was differentiated is the mean over the run's masks.
        sized = (self._slopes(masks) * counted.unsqueeze(-1), None) if slopes else None
        return packed if FLAT in params else self.unpack(packed), (losses, wrong), sized

    def _slopes(self, masks: Tensor) -> Tensor:
        """Of the gates ``(R, S, d)``, from those of the chunks that they are for."""
        rooms = self._kept[0]
        total = torch.zeros(rooms[0].groups, self.d + 1, dtype=self.wide, device=masks.device)
        for room in rooms:
            assert room.slopes is not None
            total.index_add_(1, room.bits.flatten().long(), room.slopes.flatten(1))
        return total[:, :-1].reshape(masks.shape)

    def _forward(self, flat: Tensor, masks: Tensor, x: Tensor, sloped: bool) -> Tensor:
        runs, samples, size = *masks.shape[:2], x.shape[-1]
        images = x.shape[1] // samples if sloped else x.shape[1]
        rooms, do = self._room(runs, samples, images, size, x.device)
        mixing, norms, _, _ = self._map(x.device)
        padded = torch.nn.functional.pad(flat, (0, 1))
        *convolutions, stem = mixing.read(padded.to(self.dtype))
        *affine, head = norms.read(padded.to(self.wide))
        tails = [convolutions[2], convolutions[5], head]
        by_group = masks.flatten(0, 1).to(self.wide).contiguous()  # a kernel knows no strides
        columns = _windows(x.to(self.dtype))  # (R, B * H * W, 9 * channels, padded)
        row = torch.bmm(columns, stem).view(runs * samples if sloped else runs, -1, self.stem)
        for i, room in enumerate(rooms):
            block = room.block
            room.forward, room.backward = convolutions[3 * i : 3 * i + 2]
            room.slopes = torch.zeros_like(room.gates) if sloped else None
            do.begin(room, by_group, *affine[2 * i : 2 * i + 2])
            do.enter(room, row)
            for layer in range(block.layers):
                do.layer(room, layer)
            do.pool(room)
            row = torch.bmm(room.pooled.view(runs, -1, block.slots), tails[i])
            row = row.view(runs * samples, -1, block.outputs)
        self._kept = rooms, do, columns, tails, runs
        bias = flat[:, self.starts["head.bias"] :][:, : self.classes]
        return row.view(runs, samples, images, self.classes) + bias[:, None, None]

    def _backward(self, logits: Tensor) -> Tensor:
        """logits: the gradient with respect to them. Returns the one with respect to the parameters, ``(R, P)``."""
        rooms, do, columns, tails, runs = self._kept
        _, _, place, collected = self._map(logits.device)
        buffer = torch.zeros(runs, len(collected.index), dtype=self.wide, device=logits.device)
        *parts, bias, stem = collected.parts(buffer)
        bias[:, : self.classes] = logits.sum((1, 2))
        row = logits.flatten(1, 2)  # (R, S * pixels behind the tail, outputs)
        for i in (2, 1, 0):
            room, block = rooms[i], rooms[i].block
            room.weights, tail, room.gamma_grad, room.beta_grad = parts[4 * i : 4 * i + 4]
            pooled = room.pooled.view(runs, -1, block.slots)
            tail.copy_(torch.bmm(pooled.transpose(1, 2), row))
            room.pooled_grad = torch.bmm(row, tails[i].transpose(1, 2)).view(room.pooled.shape)
            for layer in reversed(range(block.layers)):
                chunk = block.first + layer
                do.source(room, chunk, chunk + 1)
                do.finish(room, layer)
            do.source(room, 0, block.first)
            do.leave(room)
            do.convolutions(room)
            row = room.row.view(runs, -1, block.inputs)
        if rooms[0].slopes is None:  # all masks of a run read the same images
            row = row.unflatten(1, (rooms[0].samples, -1)).sum(1)
        # A product for each image, added up: a single one over all pixels would keep most of a GPU idle.
        by_image = (-1, rooms[0].block.size ** 2)
        products = columns.unflatten(1, by_image).transpose(2, 3) @ row.unflatten(1, by_image)
        stem.copy_(products.sum(1, dtype=self.wide))
        return buffer.index_select(1, place)

    # ---- where everything lies --------------------------------------------------------------------------------------

    def _blocks(self, size: int) -> list[Block]:
        if size % 4 or size < 4:
            raise BadInput(f"the fast step reads square images of a size divisible by 4, not {size} pixels")
        blocks, width = [], self.stem
        for b in range(3):
            total = width + self.layers * self.growth
            pool, outputs = (2, total) if b < 2 else (size, self.classes)
            blocks.append(Block(size, width, self.growth, self.layers, outputs, pool))
            size, width = size // 2, total
        return blocks

    def _room(
        self, runs: int, samples: int, images: int, size: int, device: torch.device
    ) -> tuple[list[Room], Operations]:
        key = (runs, samples, images, size, device)
        if key not in self._rooms:
            by_kernels = device.type == "cuda" and self.wide == torch.float32
            do = self._on_gpu(size) if by_kernels else Operations()
            blocks = enumerate(self._blocks(size))
            rooms = [self._make(b, block, runs * samples, samples, images, device) for b, block in blocks]
            self._rooms[key] = rooms, do
        return self._rooms[key]

    def _on_gpu(self, size: int) -> Operations:
        try:
            from espalier.models.densenet_fast import launch as gpu
        except ImportError as error:
            raise BadInput("the fast step on a GPU needs Triton; install it, or use the readable step") from error
        if size < 8 or size & (size - 1):
            raise BadInput(f"the fast step on a GPU reads images of 8, 16, 32 ... pixels, not {size}")
        tuning = gpu.tuned if self.precision == "bf16" else gpu.careful
        return gpu.TritonOperations("tf32" if self.precision == "tf32" else "ieee", tuning)

    def _make(self, b: int, block: Block, groups: int, samples: int, images: int, device: torch.device) -> Room:
        frames = images * (block.size + 2) ** 2
        if max(block.chunks, block.layers) * groups * frames * LANES >= 2**31:  # kernels count in 32 bits
            raise BadInput(
                f"the fast step holds fewer runs at once than {groups // samples}; use a smaller runs_at_once"
            )
        bits = self._gates(b, block).to(device, torch.int32)
        return Room(block, samples, groups, images, bits, self.dtype, self.wide, self.dtype if b < 2 else self.wide)

    def _map(self, device: torch.device) -> tuple[Spread, Spread, Tensor, Spread]:
        """Where each part finds its numbers, mixing weights and norms; then where each parameter finds its gradient."""
        if device not in self._maps:
            mixing, norms, collected = [], [], []
            for b, block in enumerate(self._blocks(32)):
                forward, backward = self._convolutions(b, block)
                tail = self._tail(b, block)
                gain, offset = (self._norms(b, block, part) for part in ("weight", "bias"))
                mixing += [forward, backward, tail] if b < 2 else [forward, backward]
                norms += [gain, offset]
                collected += [backward.permute(0, 1, 4, 2, 3), tail, gain, offset]
            stem = self._indices("stem.weight").flatten(1).T
            stem = torch.nn.functional.pad(stem, (0, 0, 0, -len(stem) % LANES), value=self.size)
            mixing.append(stem)
            norms.append(tail)  # the classifier's: losses are compared, and products of few numbers cost nothing
            bias = torch.nn.functional.pad(self._indices("head.bias"), (0, -self.classes % LANES), value=self.size)
            collected += [bias, stem]
            every = Spread.of(collected)
            used = every.index < self.size
            place = torch.empty(self.size, dtype=torch.int64)
            place[every.index[used]] = torch.arange(len(every.index))[used]
            spreads = [Spread(s.index.to(device), s.shapes) for s in (Spread.of(mixing), Spread.of(norms), every)]
            self._maps[device] = spreads[0], spreads[1], place.to(device), spreads[2]
        return self._maps[device]

    def _indices(self, name: str) -> Tensor:
        """Which column of the flat weights each number of a parameter is."""
        shape = self.shapes[name]
        indices: Tensor = self.starts[name] + torch.arange(torch.Size(shape).numel()).view(shape)
        return indices

    def _convolutions(self, b: int, block: Block) -> tuple[Tensor, Tensor]:
        forward = torch.full((block.layers, 3, block.slots, 4, LANES), self.size)
        backward = torch.full((block.layers, 9, LANES, block.slots), self.size)
        for i in range(block.layers):
            weight = self._indices(f"blocks.{b}.{i}.conv.weight").flatten(2)  # (out, in, 9)
            slots = block.channels(i)
            forward[i][:, slots, :3, : self.growth] = weight.unflatten(2, (3, 3)).permute(2, 1, 3, 0)
            backward[i][:, : self.growth, slots] = weight.flip(2).permute(2, 0, 1)
        backward = backward.unflatten(-1, (block.chunks, LANES)).permute(0, 3, 1, 2, 4)
        return forward.unflatten(2, (block.chunks, LANES)), backward

    def _tail(self, b: int, block: Block) -> Tensor:
        index = torch.full((block.slots, block.outputs), self.size)
        name = f"transitions.{b}.conv.weight" if b < 2 else "head.weight"
        index[block.channels(block.layers)] = self._indices(name).flatten(1).T
        return index

    def _norms(self, b: int, block: Block, part: str) -> Tensor:
        index = torch.full((block.consumers, block.slots), self.size)
        for i, reader in enumerate(self.readers[b]):
            index[i, block.channels(i)] = self._indices(f"{reader}norm.{part}")
        return index

    def _gates(self, b: int, block: Block) -> Tensor:
        """Which bit of the mask each consumer has for each chunk."""
        bits = torch.full((block.consumers, block.chunks), self.d)
        for i, reader in enumerate(self.readers[b]):
            bit = self.gates[f"{reader}gate"]
            bits[i, : block.first] = bit
            bits[i, block.first : block.first + i] = bit + 1 + torch.arange(i)
        return bits


def _windows(x: Tensor) -> Tensor:
    """What a 3 x 3 convolution reads at each pixel: ``(R, B, C, H, W)`` to ``(R, B * H * W, C * 9)``.

    Zeros fill up to a multiple of 16 numbers per pixel: products of odd ones are slow.
    """
    framed = torch.nn.functional.pad(x, (1, 1, 1, 1))
    windows = framed.unfold(3, 3, 1).unfold(4, 3, 1).permute(0, 1, 3, 4, 2, 5, 6)  # (R, B, H, W, C, 3, 3)
    wide = x.shape[2] * 9
    columns = x.new_zeros(*windows.shape[:4], wide + -wide % LANES)
    columns[..., :wide].unflatten(-1, windows.shape[4:]).copy_(windows)
    return columns.flatten(1, 3)
