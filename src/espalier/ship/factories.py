"""Factories of networks that can be named in text: known ones, made to fit the data, or the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.models import CNN, MLP, DenseNet
from espalier.ship import import_spec
from espalier.ship.card import Loading
from espalier.space import BadInput
from espalier.train.setting import near

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Known:
    """build: the class. fitted: its arguments for data of a shape and a number of outputs. images: what it reads."""

    build: type[nn.Module]
    fitted: Callable[[Shape, int], dict[str, Any]]
    images: bool = True


KNOWN = {
    "mlp": Known(MLP, lambda shape, n: {"inputs": math.prod(shape), "hidden": [256, 256], "outputs": n}, images=False),
    "cnn": Known(CNN, lambda shape, n: {"channels": shape[0], "outputs": n}),
    "densenet": Known(DenseNet, lambda shape, n: {"channels": shape[0], "classes": n}),
}


@dataclass(frozen=True)
class Network:
    """reference: as the command line has it. arguments: of its factory. shape, outputs: of the data, which a network
    known by name is made for; a factory of one's own is given its arguments alone."""

    reference: str
    arguments: dict[str, Any]
    shape: Shape | None = None
    outputs: int | None = None

    def __post_init__(self) -> None:
        if import_spec.is_reference(self.reference):
            return
        if self.reference not in KNOWN:
            raise BadInput(
                f"there is no network {self.reference!r}, only {', '.join(KNOWN)}; your own is "
                f"package.module:function or file.py:function{near(self.reference, KNOWN)}"
            )
        if self.shape is None or self.outputs is None:
            raise BadInput(
                f"{self.reference} is made for one tensor of inputs and integer classes, which these data are not; use "
                "a network of your own, as --model file.py:function"
            )
        if KNOWN[self.reference].images and len(self.shape) != 3:
            raise BadInput(
                f"{self.reference} reads images (channels, height, width); these inputs are of shape {self.shape}"
            )

    def build(self, seed: int | None = None) -> nn.Module:
        """A new one; with a seed, always of the same weights."""
        what = "--model"
        if import_spec.is_reference(self.reference):
            factory, given = import_spec.function(self.reference, what), dict(self.arguments)
            if isinstance(factory, nn.Module):
                raise BadInput(
                    f"{what} {self.reference!r} is a network, of which there is only this one; name the function, or "
                    "class, that builds it"
                )
        else:
            factory, given = KNOWN[self.reference].build, self._fitted()
        if seed is not None:
            torch.manual_seed(seed)
        model = import_spec.call(factory, given, self.reference, what)
        if not isinstance(model, nn.Module):
            raise BadInput(f"--model {self.reference!r} gives a {type(model).__name__}, not a torch.nn.Module")
        return model

    def _fitted(self) -> dict[str, Any]:
        assert self.shape is not None
        assert self.outputs is not None
        return KNOWN[self.reference].fitted(self.shape, self.outputs) | self.arguments

    @property
    def loading(self) -> Loading:
        """How a card says what builds it."""
        where, _, name = self.reference.rpartition(":")
        module, given = Path(where).stem if where.endswith(".py") else where, self.arguments
        if not import_spec.is_reference(self.reference):
            module, name, given = "espalier.models", KNOWN[self.reference].build.__name__, self._fitted()
        words = ", ".join(f"{key}={value!r}" for key, value in given.items())
        return Loading(f"from {module} import {name.split('.')[0]}", f"{name}({words})", where)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"file_sha256": import_spec.fingerprint(self.reference)}

    @staticmethod
    def from_json(record: dict[str, Any]) -> Network:
        shape = None if record.get("shape") is None else tuple(record["shape"])
        return Network(record["reference"], record["arguments"], shape, record.get("outputs"))
