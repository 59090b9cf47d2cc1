"""Data: known sets and your own, fixed splits, and batches made on the device. Needs nothing of the layers above."""

from espalier.data.batches import Stream, crop_flip, epoch_orders, gather, standardise
from espalier.data.dataset import Dataset, folds, from_arrays, held_out
from espalier.data.known_files import names
from espalier.data.load import Status, all_digits, available, get, load, verify

__all__ = [
    "Dataset",
    "Status",
    "Stream",
    "all_digits",
    "available",
    "crop_flip",
    "epoch_orders",
    "folds",
    "from_arrays",
    "gather",
    "get",
    "held_out",
    "load",
    "names",
    "standardise",
    "verify",
]
