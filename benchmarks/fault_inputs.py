"""What the fault campaign is made of: tiny data and networks, ways to damage a file, and calls with odd arguments."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import espalier
import espalier.train
from espalier.compact import Plan
from espalier.data import from_arrays
from espalier.report import read as read_report

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def net(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


# ---- damage ----------------------------------------------------------------------------------------------------------

ODD = (
    None, True, -1, 0, 1e308, 1 << 62, "", "x", "../../../canary", "../canary", "\x00", "=cmd()", [], {}, [[]],
    [0, 1 << 40], [[0, 1000000000000]], {"kind": "zeros", "width": 1 << 40}, 0.5, "\u202e", "a" * 5000,
)  # fmt: skip


def mutate(path: Path, draw: random.Random) -> str:
    """Damage a file; returns how."""
    data = path.read_bytes()
    ways = ["bit", "bit", "bits", "cut", "insert", "empty", "twice", "link", "pipe", "folder"]
    if path.suffix in (".json", ".jsonl"):
        ways += ["value"] * 8 + ["key"] * 4 + ["deep", "huge", "half"]
    how = draw.choice(ways)
    if how in ("bit", "bits") and data:
        changed = bytearray(data)
        for _ in range(1 if how == "bit" else draw.randint(2, 50)):
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        data = bytes(changed)
    elif how == "cut":
        data = data[: draw.randrange(len(data) + 1)]
    elif how == "insert":
        at = draw.randrange(len(data) + 1)
        data = data[:at] + bytes(draw.randrange(256) for _ in range(draw.randint(1, 20))) + data[at:]
    elif how == "empty":
        data = b""
    elif how == "twice":
        data += data
    elif how in ("value", "key"):
        lines = data.splitlines() if path.suffix == ".jsonl" else [data]
        at = draw.randrange(len(lines))
        value = json.loads(lines[at])
        spot, name = draw.choice(list(spots(value)))
        odd = draw.choice(ODD)
        if how == "value":
            spot[name] = odd
        elif isinstance(spot, dict):
            spot.pop(name)
            spot[draw.choice(["x", "", "__class__", name + "x" if isinstance(name, str) else "y"])] = odd
        how = f"{how} {name} {str(odd)[:30]}"
        lines[at] = json.dumps(value).encode()
        data = b"\n".join(lines) + b"\n"
    elif how == "deep":
        data = b"[" * 100_000
    elif how == "huge":
        data = b'{"format": ' + b"9" * 10_000 + b"}"
    elif how == "half":
        data = data.replace(b'"', b'"\\ud800', 3)
    path.unlink()
    if how == "link":
        path.symlink_to("/dev/zero" if draw.random() < 0.5 else path.name)
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.write_bytes(data)
    return how


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value that can be set."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in list(items)[:200]:
        yield value, name
        yield from spots(item)


# ---- odd calls -------------------------------------------------------------------------------------------------------


def odd_values(draw: random.Random) -> Any:
    tensors_ = (
        torch.zeros(0),
        torch.full((3,), torch.nan),
        X,
        Y,
        torch.zeros(2, 2, dtype=torch.complex64),
        X.to_sparse(),
    )
    plain = (
        None,
        True,
        -1,
        0,
        1,
        3,
        1.5,
        -0.0,
        1e400,
        float("nan"),
        10**23,
        "",
        "x",
        "cpu",
        "meta",
        b"x",
        [],
        (),
        {},
        set(),
    )
    more = (
        object(),
        int,
        len,
        lambda *a, **k: None,
        [1, "a"],
        {"a": 1},
        Path("x"),
        np.zeros(3),
        np.array(["a"]),
        net(),
    )
    return draw.choice([*tensors_, *plain, *plain, *more])


CALLED = ("loss", "optimizer", "scheduler", "batch", "factory", "cost")  # an error of such a function is its own


def odd_call(draw: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    """A public function with one or two arguments replaced by odd ones; words for it."""
    model, space = net(), espalier.Space([espalier.Bits("a", 4)])
    usual: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "fit": (espalier.fit, {
            "model": model, "data": (X, Y), "epochs": 1, "loss": F.cross_entropy, "cost": "weights", "penalty": None,
            "target": 0.5, "batch_size": 24, "batch": None, "samples": 2, "optimizer": None, "schedule": None,
            "scheduler": None, "settle": None, "recipe": None, "seed": 0, "device": "cpu", "precision": None,
            "kinds": ("units",), "ignore": (), "round_to": None, "metrics": None, "monitor": None,
            "validation": None, "checkpoint": None, "resume": "same", "time_limit": 0.02, "callbacks": (),
            "quiet": True,
        }),
        "sweep": (espalier.sweep, {
            "factory": net, "data": (X, Y), "targets": [0.5], "seeds": (0,), "epochs": 1, "batch_size": 24,
            "samples": 2, "cost": "weights", "settle": None, "validation": None, "at_once": None, "device": "cpu",
            "time_limit": 0.02, "callbacks": (), "quiet": True, "points": None, "pad": 0, "kinds": None, "ignore": (),
            "round_to": None, "metrics": None, "batch": None,
        }),
        "attach": (espalier.attach, {
            "model": model, "example_inputs": X[:4], "kinds": ("units",), "ignore": (), "round_to": None,
        }),
        "shape": (espalier.shape, {
            "model": model, "example": X[:4], "updates": 5, "target": 0.5, "samples": None, "round_to": None,
            "kinds": None, "ignore": (), "optimizer": None, "recipe": None, "seed": 0,
        }),
        "load": (espalier.load, {"folder": folder / "none", "factory": net}),
        "save": (espalier.save, {"small": model, "folder": folder / "saved"}),
        "ship": (espalier.ship, {
            "result_or_run": folder / "none", "to": folder / "to", "formats": ("torch",), "inputs": None,
        }),
        "evaluate": (espalier.train.evaluate, {
            "model": model, "data": (X, Y), "loss": F.cross_entropy, "batch_size": 16,
        }),
        "from_arrays": (from_arrays, {"train": (X, Y), "test": (X, Y), "classes": None, "scale": 1.0}),
        "Search": (espalier.Search, {"space": space, "cost": torch.ones(4), "samples": 2, "target": 0.5}),
        "Plan": (Plan.from_dict, {"data": {"format": 1, "tensors": {}, "shapes": {}, "attributes": {}, "layers": {}}}),
        "report": (read_report, {"folder": folder}),
    }  # fmt: skip
    weights = {
        "fit": 0.4,
        "sweep": 0.1,
        "attach": 0.6,
        "shape": 0.6,
        "evaluate": 4,
        "from_arrays": 8,
        "Search": 6,
        "Plan": 8,
    }
    name = draw.choices(list(usual), [weights.get(key, 4) for key in usual])[0]
    function, given = usual[name]
    odd = {key: odd_values(draw) for key in draw.sample(list(given), min(len(given), draw.choice([1, 1, 2])))}
    odd = {key: value for key, value in odd.items() if not (key in CALLED and callable(value))}
    about = f"{name}({', '.join(f'{key}={type(value).__name__} {str(value)[:20]!r}' for key, value in odd.items())})"
    return about, lambda: function(**given | odd)
