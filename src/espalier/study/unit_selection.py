"""The paper's first experiment: unit selection by the search, against fixed networks and dropout."""

from __future__ import annotations

from espalier.data import Dataset
from espalier.study.network import Network
from espalier.study.settings import Settings
from espalier.study.study import Experiment


def _vectors(data: Dataset) -> Dataset:
    """Pixels as stored; divided by their largest value when read (MNIST: 255)."""
    return data.flatten()


def _network(settings: Settings, data: Dataset) -> Network:
    inputs = data.train_inputs.shape[1]
    return Network((inputs, *(settings.hidden or (inputs,) * 3), len(data.classes)))


UNIT_SELECTION = Experiment("unit-selection", (("search",), ("fixed", "dropout")), _vectors, _network)
