"""From resident data to a batch, on the device: gather, standardise, and crop and flip by given offsets.

Pure functions of tensors, without a loop over images, without a look at values, without randomness of their own: they
compile, are captured in CUDA graphs, and take any leading dimensions (runs, then batch).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
