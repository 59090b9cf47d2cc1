"""What a study keeps of its runs: a JSON file for each, or of a grid a JSON-lines file for each batch.

A run's file holds what was asked for, what came out, and where, when and with what it ran. A grid has thousands of
short runs; a file for each would be mostly repetition, so a batch's file holds what its runs share in its first line.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier import schema
from espalier.files import clean, write
from espalier.records import FORMAT, runs_of
from espalier.space import BadInput, Corrupt
from espalier.study.settings import RunSpec
from espalier.train.batched.batch import Compute
from espalier.train.fingerprint import versions
from espalier.train.run_directory import hardware

Record = dict[str, Any]
DATA = "data_sha256"  # of a run file


def save(path: Path, record: Mapping[str, Any]) -> None:
    """The file of one run, complete or not at all."""
    whole = clean({"format": FORMAT} | dict(record) | {schema.CHECKSUM: schema.BLANK})
    text = json.dumps(whole, allow_nan=False, separators=(",", ":"))
    # A line for each part of the file and for each row of the curve, so that differences can be read.
    for part in ('"run":', '"settings":', '"result":', '"curve":', '"seconds":', '"hardware":', '"versions":'):
        text = text.replace(part, "\n" + part, 1)
    write(path, schema.seal(text.replace('{"update":', '\n{"update":')))


@dataclass
class Ours:
    """What a study goes on with: files of runs on these data (a hash of all of them), and of the settings asked for.

    anyway: files of other data or settings count as finished too, and what differs is kept in ``forced``.
    """

    data: str
    anyway: bool = False
    forced: list[str] = field(default_factory=list)

    def described(self, *more: str) -> Record:
        """What the file of a new run says of it. more: in what its checkpoint differed."""
        forced = list(dict.fromkeys([*self.forced, *more]))
        return {DATA: self.data} | ({"forced": forced} if forced else {})

    def check(self, path: Path, theirs: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Refuse a file (theirs: its first record) of other settings or data; the error shows each that differs.

        Files of earlier versions do not say which data they are of.
        """
        settings = json.loads(json.dumps(dict(settings)))  # as a file has them
        known = {DATA: self.data} if DATA in theirs else {}
        there, here = {**theirs["settings"], **{key: theirs[key] for key in known}}, {**settings, **known}
        differ = [
            f"{key}: {there.get(key, 'not set')} there, {here.get(key, 'not set')} here"
            for key in sorted(there.keys() | here.keys())
            if there.get(key, ...) != here.get(key, ...)
        ]
        if differ and not self.anyway:
            raise BadInput(
                f"{path} is of other settings or data: {'; '.join(differ)}. Use the same, or another folder (--force "
                "goes on all the same; the runs to come then record what differed)"
            )
        self.forced = list(dict.fromkeys([*self.forced, *differ]))

    def done(self, path: Path, settings: Mapping[str, Any]) -> bool:
        """Whether this run is finished, under these settings."""
        if not os.path.lexists(path):
            return False
        self.check(path, runs_of(path)[0], settings)
        return True

    def finished(self, folder: Path, settings: Mapping[str, Any]) -> dict[tuple[Any, ...], Record]:
        """The finished runs of a grid in a folder by their key."""
        records = dict[tuple[Any, ...], Record]()
        for path in sorted(folder.glob("*.jsonl")):
            head, *batch = runs_of(path)
            self.check(path, head, settings)
            for record in batch:
                run = record["run"]
                key = tuple(run.get(name) for name in ("method", "fold", "target", "penalty", "seed"))
                if not all(isinstance(part, (str, int, float, NoneType)) for part in key):
                    raise Corrupt(f"{path} has a run that no grid has: {str(key)[:80]}. Remove it to run them again")
                records[key] = record
        return records


def batch_name(runs: Sequence[RunSpec]) -> str:
    """Of the file of a batch: fold, settings and seeds.

    >>> batch_name([RunSpec("search", "search", seed, 0, seed / 16) for seed in (4, 8)])
    'fold_0-target_0.25_to_0.5-seed_4_to_8'
    """
    parts = [] if runs[0].fold is None else [f"fold_{runs[0].fold}"]
    for label in ("target", "penalty", "seed"):
        values = [getattr(run, label) for run in runs if getattr(run, label) is not None]
        if values:
            ends = dict.fromkeys((min(values), max(values)))
            parts.append(f"{label}_" + "_to_".join(map(str, ends)))
    return "-".join(parts)


def save_batch(path: Path, head: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """The file of a batch of a grid, complete or not at all."""
    first, *lines = [clean(line, digits=6) for line in ({"format": FORMAT} | dict(head), *records)]
    write(path, schema.sealed(first, lines, separators=(",", ":")))


def origin(commit: str, command: str, device: torch.device, compute: Compute) -> Record:
    """Where, when and with what runs were trained."""
    return {
        "hardware": hardware(device),
        "versions": versions(),
        "commit": commit,
        "command": command,
        "compute": asdict(compute),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def revision() -> str:
    """The revision of the source that runs, marked if files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        head, changes = (
            subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=20, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no", "."))
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head.strip() + ("-modified" if changes.strip() else "")


def mask_to_hex(mask: Tensor) -> str:
    """A mask ``(d)`` as hexadecimal digits, its first gate the highest bit.

    >>> mask_to_hex(torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0]))
    'a4'
    """
    bits = mask.flatten().cpu().numpy() != 0
    return np.packbits(bits).tobytes().hex()[: -(-len(bits) // 4)]
