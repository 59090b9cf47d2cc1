"""Data: known sets and your own, fixed splits, and batches made on the device. Needs nothing of the layers above."""

from espalier.data.batch import crop_flip, gather, standardise
from espalier.data.catalogue import names
from espalier.data.dataset import Dataset, from_arrays
from espalier.data.digits import all_digits
from espalier.data.load import Status, available, get, load, verify
from espalier.data.order import Stream, epoch_orders, orders
from espalier.data.split import folds, held_out

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
    "orders",
    "standardise",
    "verify",
]
