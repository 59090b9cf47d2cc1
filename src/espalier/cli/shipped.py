"""What ships from a run, beside its run files: the small network, what it costs, and what it answered.

``small/``            the compact model, as espalier.save writes it
``shipped.json``      units, weights, MACs and parameters, kept and in full; errors, and on what
``probe.safetensors`` a few real inputs and the small network's outputs, by which every later copy of it is checked
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import espalier
from espalier.cli.networks import Network
from espalier.integrations.compare import answers, apart
from espalier.space import BadInput, Corrupt
from espalier.train import Result, Score, feed, nested, tree
from espalier.train.checkpoint import pack, unpack, write
from espalier.train.metrics import clean
from espalier.train.step import Gated

SMALL, STORY, PROBE = "small", "shipped.json", "probe.safetensors"
COUNTED = ("units", "weights", "macs", "parameters")
PROBED = 64  # examples


@dataclass(frozen=True)
class Probe:
    """inputs: some real ones, as the network reads them. outputs: the tensors that it gave for them."""

    inputs: Any
    outputs: list[Tensor]

    def difference(self, model: nn.Module) -> float:
        """The largest difference of a model's outputs from these, relative to the largest of them."""
        return apart(answers(model, self.inputs), self.outputs)


def save(
    folder: Path, result: Result, gated: Gated, reading: feed.Feed, *, judged_on: str, prepared: str, test: Score | None
) -> dict[str, Any]:
    """Write what ships from a run beside the run's own files. Returns its numbers."""
    mask, ones = result.mask, torch.ones_like(result.mask)
    example = nested.count(reading.example(), "the inputs")
    sizes = {}
    for kind in COUNTED:
        cost, per = gated.cost(kind), example if kind == "macs" else 1  # MACs are of the whole example batch
        sizes[kind] = [round(float(cost(mask)) / per), round(float(cost(ones)) / per)]
    inputs = nested.each(lambda t: t[:PROBED].cpu(), next(iter(reading.once(PROBED)))[0])
    small = deepcopy(result.model).cpu()  # what ships runs anywhere
    outputs = answers(small, inputs)
    espalier.save(small, folder / SMALL)
    structure, tensors = tree.split({"inputs": inputs, "outputs": outputs})
    write(folder / PROBE, pack({"format": 1, "state": structure}, tensors))
    story: dict[str, Any] = {
        "finished": result.finished,
        "sizes": sizes,
        "inputs": prepared,
        "judged_on": judged_on,
    }
    for name, score in (("validation", result.validation), ("test", test)):
        found = {"loss": None, "error": None, "examples": None} if score is None else asdict(score)
        story |= clean({f"{name}_{key}": value for key, value in found.items()})
    write(folder / STORY, (json.dumps(story, indent=2, allow_nan=False) + "\n").encode())
    return story


def story(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / STORY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Corrupt(f"{folder / STORY} cannot be read: {error}. Run the same training command again") from None
    if not isinstance(found, dict) or not {"finished", "sizes"} <= found.keys():
        raise Corrupt(f"{folder / STORY} is not what a training wrote. Run the same training command again")
    return found


def probe(folder: Path) -> Probe:
    try:
        header, tensors = unpack((folder / PROBE).read_bytes())
    except OSError as error:
        raise BadInput(f"{folder / PROBE} cannot be read: {error.strerror}") from None
    except Corrupt as error:
        raise Corrupt(f"{folder / PROBE}: {error}") from None
    state = tree.join(header["state"], tensors)
    return Probe(state["inputs"], state["outputs"])


def load(folder: Path, network: Network) -> nn.Module:
    """The small network of a run, in eval mode."""
    return espalier.load(folder / SMALL, network.build).eval()
