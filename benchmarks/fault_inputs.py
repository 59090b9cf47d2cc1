"""What the fault campaign is made of: tiny data and networks, ways to damage a file, and calls with odd arguments."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import espalier
import espalier.train
from espalier import schema
from espalier.compact import Plan
from espalier.data import from_arrays
from espalier.report import read as read_report

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def net(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


# ---- damage ----------------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    None, True, -1, 0, 1e308, 1 << 62, "", "x", "../../../canary", "../canary", "\x00", "=cmd()", [], {}, [[]],
    [0, 1 << 40], [[0, 1000000000000]], {"kind": "zeros", "width": 1 << 40}, 0.5, "\u202e", "a" * 5000, "\ud800",
    1e400, float("nan"), 1 << 64,
]  # fmt: skip
NAMES = st.text(max_size=6) | st.sampled_from(["__class__", "format", "tensors", "../canary"])
LEAVES = st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


def changed(value: Any) -> st.SearchStrategy[Any]:
    """A JSON value that differs from this one in one place: another value there, one that is near, a part more or less,
    or with another name."""
    ways = [JSON, JSON, st.sampled_from(near(value))]
    if isinstance(value, dict) and value:
        names = st.sampled_from(list(value))
        inside = names.flatmap(lambda name: changed(value[name]).map(lambda new: value | {name: new}))
        ways += [names.map(lambda name: {key: item for key, item in value.items() if key != name})]
        ways += [st.tuples(names, NAMES).map(lambda pair: {pair[1] if key == pair[0] else key: item
                                                            for key, item in value.items()})]  # fmt: skip
        ways += [st.tuples(NAMES, JSON).map(lambda pair: value | {pair[0]: pair[1]}), *[inside] * 12]
    elif isinstance(value, list) and value:
        places = st.integers(0, len(value) - 1)
        inside = places.flatmap(lambda at: changed(value[at]).map(lambda new: [*value[:at], new, *value[at + 1 :]]))
        ways += [places.map(lambda at: value[:at]), places.map(lambda at: [*value, value[at]]), *[inside] * 8]
    return st.one_of(ways)


def near(value: Any) -> list[Any]:
    """What a slip would make of it."""
    if isinstance(value, bool) or value is None:
        return [not value, str(value), [value]]
    if isinstance(value, (int, float)):
        return [value + 1, value - 1, -value, 2 * value, str(value), [value], value * (1 << 40)]
    if isinstance(value, str):
        return [value[:-1], value + "x", value.upper(), f"../../../canary/{value}", f"/{value}", [value], value + "\n"]
    return [[value], len(value)]


def bytes_changed(data: bytes) -> st.SearchStrategy[bytes]:
    """Bits flipped, cut off, something more in it, a piece of it elsewhere too."""
    places = st.integers(0, len(data))
    ways = [
        places.map(lambda end: data[:end]),
        st.tuples(places, st.binary(min_size=1, max_size=20)).map(lambda p: data[: p[0]] + p[1] + data[p[0] :]),
        st.tuples(places, places, places).map(lambda p: data[: p[0]] + data[min(p[1:]) : max(p[1:])] + data[p[0] :]),
        st.sampled_from([b"", data + data, b"[" * 100_000, b'{"format": ' + b"9" * 10_000 + b"}"]),
        st.just(data.replace(b'"', b'"\\ud800', 3)),
    ]
    if data:
        bits = st.integers(0, 8 * len(data) - 1)
        ways += [
            st.lists(bits, min_size=1, max_size=count, unique=True).map(partial(flipped, data)) for count in (1, 50)
        ]
    return st.one_of(ways)


def flipped(data: bytes, bits: list[int]) -> bytes:
    there = bytearray(data)
    for bit in bits:
        there[bit // 8] ^= 1 << bit % 8
    return bytes(there)


def damaged_json(path: Path, forged: bool) -> st.SearchStrategy[bytes]:
    """A file of JSON, or of JSON lines, with one place changed. forged: its checksum is that of the new content."""
    lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
    values = [json.loads(line) for line in lines]

    def written(given: tuple[int, Any]) -> bytes:
        now = [*values[: given[0]], given[1], *values[given[0] + 1 :]]
        seal = forged and isinstance(now[0], dict)
        if seal and schema.CHECKSUM in now[0]:
            now[0] = now[0] | {schema.CHECKSUM: schema.BLANK}
        first, *rest = (json.dumps(value).encode("utf-8", "surrogatepass") for value in now)
        body = b"".join(line + b"\n" for line in rest)
        if seal and "schema" in now[0]:  # packed runs
            first = json.dumps(now[0] | {"sha256": hashlib.sha256(body).hexdigest()}).encode()
        data = first + b"\n" + body
        return schema.seal(data.decode().removesuffix("\n")).encode() if seal and schema.CHECKSUM in now[0] else data

    places = st.integers(0, len(lines) - 1)
    return places.flatmap(lambda at: changed(values[at]).map(lambda new: (at, new))).map(written)


def damage(draw: Callable[[st.SearchStrategy[Any]], Any], path: Path, forged: bool) -> str:
    """Damage a file; returns how. draw: of Hypothesis."""
    kinds = ["bytes"] * 4 + (["json"] * 12 if path.suffix in (".json", ".jsonl") else [])
    how: str = draw(st.sampled_from([*kinds, "link to itself", "endless link", "pipe", "folder"]))
    data = b""
    if how == "bytes":
        data = draw(bytes_changed(path.read_bytes()))
    elif how == "json":
        data = draw(damaged_json(path, forged))
    path.unlink()
    if how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif "link" in how:
        path.symlink_to("/dev/zero" if how == "endless link" else path.name)
    else:
        path.write_bytes(data)
    return f"{how} {hashlib.sha256(data).hexdigest()[:8]}"


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
