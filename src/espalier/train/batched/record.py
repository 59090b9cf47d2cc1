"""A run directory for each run of a sweep, as :func:`espalier.fit` writes for its one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from espalier.train.batched.group import Group
from espalier.train.batched.measure import Row
from espalier.train.batched.result import SweepResult
from espalier.train.metrics import Thinned
from espalier.train.record import Record


class Records:
    """``folder/run-000`` and so on, numbered as the runs of the sweep are."""

    def __init__(self, folder: Path, numbers: Sequence[int], group: Group) -> None:
        self.group = group
        self.records = [Record(folder / f"run-{number:03d}") for number in numbers]
        self.started = False
        for record in self.records:
            record.check()

    def start(self) -> None:
        """Once the group knows its history: rows written after its checkpoint are written again."""
        for record, run, history in zip(self.records, self.group.runs, self.group.histories, strict=True):
            record.start(self.group.settings | run.describe(), self.group.device, history)
        self.started = True

    def epoch(self, rows: Sequence[Row]) -> None:
        if not self.started:
            return self.start()  # the history holds these rows already
        for record, row in zip(self.records, rows, strict=True):
            record.epoch(row)

    def finish(self, results: Sequence[SweepResult]) -> None:
        if not self.started:
            self.start()
        if not self.group.finished:
            return
        for i, (record, result) in enumerate(zip(self.records, results, strict=True)):
            theta = Thinned()
            theta.updates = self.group.thetas.updates
            theta.snapshots = [snapshot[i] for snapshot in self.group.thetas.snapshots]
            record.finish(result.summary(), theta)
