"""The paper's second experiment: connection selection in a DenseNet, against random selection and the whole network."""

from __future__ import annotations

from espalier.data import Dataset
from espalier.study.connections import Connections
from espalier.study.settings import ConnectionSettings
from espalier.study.study import Experiment


def _images(data: Dataset) -> Dataset:
    """As stored; each channel is standardised when it is read."""
    return data


def _network(settings: ConnectionSettings, data: Dataset) -> Connections:
    return Connections(
        settings.depth,
        settings.growth,
        data.shape,
        len(data.classes),
        step=settings.step,
        precision=settings.precision,
    )


CONNECTION_SELECTION = Experiment("connection-selection", (("search",), ("random", "full")), _images, _network)
