"""From resident data to batches: the order in which each run reads, then gather, standardise, crop and flip.

An order is an endless stream of epochs, every epoch a fresh permutation. Permutations and crops are a hash of (the
run's seed, what is drawn, where in the stream): integers only, so the CPU and the GPU agree, a run reads the same alone
as in a batch of runs, and the whole state is one position.

Pure functions make a batch of it. They do not loop over images, look at values or draw random numbers, so they compile,
can be captured in CUDA graphs, and take any leading dimensions (runs, then batch).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from espalier.space import BadInput, Corrupt, whole_number

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: the step between the hash's inputs
ORDER, TOP, LEFT, FLIP = 1, 2, 3, 4  # what is drawn


def epoch_orders(seeds: Tensor, epoch: int, n: int) -> Tensor:
    """seeds ``(*B)`` int64. Returns ``(*B, n)`` int64: for each run its permutation of ``range(n)`` in that epoch."""
    keys = _hash(_keys(seeds, ORDER, epoch), torch.arange(n, device=seeds.device))
    return torch.argsort(keys, dim=-1, stable=True)


class Stream:
    """The examples each run reads, one epoch after another without a gap.

    ``seeds``: one integer, or one per run; equal seeds read in equal order. A batch may begin in one epoch and end in
    the next: every shape is fixed, no example is left out, and E epochs of n examples are E n / batch updates.

    >>> stream = Stream([7, 8], n=5)
    >>> stream.take(1, 4).shape, stream.position
    (torch.Size([1, 2, 4]), 4)
    """

    def __init__(self, seeds: int | Sequence[int], n: int, device: torch.device | str = "cpu") -> None:
        if check_integer("the number of examples", n, 0) == 0:
            raise BadInput("the data are empty: there is nothing to read")
        every = seeds if isinstance(seeds, Sequence) else (seeds,)
        if not every:
            raise BadInput("no seeds, so no runs; give one seed for each run")
        for seed in every:
            check_integer("the seed of a run", seed, 0)
        self.n = n
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=device)
        self.position = 0  # examples each run has read
        self._epoch_order: tuple[int, Tensor] | None = None

    @property
    def epoch(self) -> float:
        """Epochs read, with their fraction."""
        return self.position / self.n

    def take(self, updates: int, batch: int) -> Tensor:
        """The next examples, as indices ``(updates, *B, batch)`` int64, and move on."""
        self._check_batch(updates, batch)
        start, stop = self.position, self.position + updates * batch
        parts = []
        while start < stop:
            epoch, within = divmod(start, self.n)
            count = min(self.n - within, stop - start)
            if self._epoch_order is None or self._epoch_order[0] != epoch:
                self._epoch_order = (epoch, epoch_orders(self.seeds, epoch, self.n))
            parts.append(self._epoch_order[1][..., within : within + count])
            start += count
        self.position = stop
        return self._by_update(torch.cat(parts, -1), updates)

    def crops(self, position: int, updates: int, batch: int, pad: int) -> tuple[Tensor, Tensor, Tensor]:
        """``(top, left, flip)`` for :func:`espalier.data.crop_flip`, each ``(updates, *B, batch)``.

        ``position``: the stream's position before these updates were taken. The stream does not move.
        """
        self._check_batch(updates, batch)
        check_integer("the padding", pad, 0)
        check_integer("the position", position, 0)
        where = torch.arange(position, position + updates * batch, device=self.seeds.device)

        def draw(what: int, options: int) -> Tensor:
            words = (_hash(_keys(self.seeds, what, 0), where) >> 33) & 0x3FFFFFFF
            # 30 bits over a handful of options: the bias of the remainder is below 1e-8.
            return self._by_update(words % options, updates)

        return draw(TOP, 2 * pad + 1), draw(LEFT, 2 * pad + 1), draw(FLIP, 2).bool()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly; plain numbers, ready for JSON."""
        return {"seeds": self.seeds.tolist(), "n": self.n, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another stream over the same data stood."""
        mine = self.state_dict()
        if set(state) != set(mine):
            raise Corrupt(f"the state of a stream holds {sorted(mine)}, not {sorted(state)}")
        for name in ("n", "seeds"):
            if state[name] != mine[name]:
                raise BadInput(f"a state of another stream: {name} {state[name]}, here {mine[name]}")
        check_integer("the position of a stream", state["position"], 0)
        self.position = state["position"]

    def _by_update(self, values: Tensor, updates: int) -> Tensor:
        """values ``(*B, updates * batch)`` as ``(updates, *B, batch)``."""
        return values.reshape(*self.seeds.shape, updates, -1).movedim(-2, 0).contiguous()

    def _check_batch(self, updates: int, batch: int) -> None:
        check_integer("the number of updates", updates, 1)
        check_integer("the batch", batch, 1)
        if batch > self.n:
            raise BadInput(f"a batch of {batch} is larger than the data, {self.n} examples; use at most {self.n}")


def _keys(seeds: Tensor, what: int, epoch: int) -> Tensor:
    """One key per run, draw and epoch: ``(*B)`` int64."""
    return _mix(_mix(seeds + _signed(GOLDEN * what)) + _signed(GOLDEN * (epoch + 1)))


def _hash(keys: Tensor, where: Tensor) -> Tensor:
    """keys ``(*B)``, where ``(k,)``: ``(*B, k)`` words of 64 bits, each position's own."""
    if torch.compiler.is_compiling():
        # Inductor for the CPU (torch 2.13) fuses this into code that writes past its buffer and corrupts memory.
        raise BadInput("orders and crops are drawn outside compiled code: draw them first and pass them in")
    return _mix(keys.unsqueeze(-1) + (where + 1) * _signed(GOLDEN))


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, 2014): a bijection that spreads every bit; wraps at 64 bits."""
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift right bringing in zeros; torch has signed 64-bit integers only, whose own shift brings in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """A word of 64 bits as the signed integer with the same bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def check_integer(what: str, value: object, least: int) -> int:
    """``value`` as an int, if it is one (NumPy's too, a bool not) and at least ``least``.

    >>> check_integer("the batch", 32, 1)
    32
    """
    with contextlib.suppress(TypeError):  # a tensor of several values or of floats has the method, and no integer
        value = value if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    return whole_number(value, what, least)


# ---- one batch, on the device ----------------------------------------------------------------------------------------


def gather(resident: Tensor, index: Tensor) -> Tensor:
    """Examples by index: resident ``(n, *shape)``, index ``(*B)`` int64, result ``(*B, *shape)``."""
    return resident[index]


def standardise(inputs: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """What a network reads of stored inputs: ``inputs * gain + shift`` in the dtype of `gain`.

    inputs ``(*B, *shape)``; gain and shift, from :meth:`espalier.data.Dataset.affine`, broadcast over one input.
    """
    return inputs.to(gain.dtype) * gain + shift


def crop_flip(images: Tensor, top: Tensor, left: Tensor, flip: Tensor, *, pad: int) -> Tensor:
    """Pad each image with ``pad`` zeros on every side, cut a window of the old size, mirror it where ``flip`` says so.

    images ``(*B, C, H, W)``; top, left ``(*B)`` int64, the window's corner, 0 to ``2 * pad``; flip ``(*B)`` bool.
    The padding is zero in what is given: standardise first, and it is the mean colour.
    """
    height, width = images.shape[-2:]
    row = torch.arange(height, device=images.device) + (top.unsqueeze(-1) - pad)
    column = torch.arange(width, device=images.device)
    column = torch.where(flip.unsqueeze(-1), width - 1 - column, column) + (left.unsqueeze(-1) - pad)
    # One gather over flattened pixels: outside the image any pixel is read, then blanked.
    inside = _within(row, height).unsqueeze(-1) & _within(column, width).unsqueeze(-2)
    pixel = row.clamp(0, height - 1).unsqueeze(-1) * width + column.clamp(0, width - 1).unsqueeze(-2)
    flat = images.flatten(-2)
    window = flat.gather(-1, pixel.flatten(-2).unsqueeze(-2).expand(flat.shape)).reshape(images.shape)
    return window.masked_fill(~inside.unsqueeze(-3), 0)


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)
