"""Several updates as one CUDA graph: the host says "go on" once for all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from espalier.train.batched.mask_sources import Source
from espalier.train.batched.resident_data import Reading

Update = Callable[..., object]  # (source, reading, noise)


class Captured:
    """As many updates as the reading holds, recorded once and replayed with other examples and fresh noise."""

    def __init__(self, update: Update, source: Source, reading: Reading, pool: object = None) -> None:
        self.reading = reading.clone()
        updates, examples = len(reading.index), reading.index.shape[-1]
        self.graph = torch.cuda.CUDAGraph()
        if source.generator is not None:  # else every replay would draw the noise that was drawn at the recording
            self.graph.register_generator_state(source.generator)
        with torch.cuda.graph(self.graph, pool=pool):  # type: ignore[arg-type]
            for i in range(updates):
                update(source, self.reading.at(i), source.noise(examples))

    def replay(self, reading: Reading) -> None:
        self.reading.copy_(reading)
        self.graph.replay()


class Replayer:
    """Runs any number of updates of one source: the first few as they are, then recorded, ``length`` at a time.

    The first ones let kernels be compiled, chosen and their workspaces be allocated, which a recording must not do.
    """

    WARM_UP = 3

    def __init__(self, update: Update, source: Source, length: int) -> None:
        self.update, self.source, self.length = update, source, length
        self.left_to_warm = self.WARM_UP
        self.recorded: dict[int, Captured] = {}

    def next(self, wanted: int) -> int:
        """How many of the wanted updates the next call of ``run`` should read."""
        return self.length if not self.left_to_warm and wanted >= self.length else 1

    def run(self, reading: Reading) -> None:
        updates, examples = len(reading.index), reading.index.shape[-1]
        if self.left_to_warm:
            self.left_to_warm -= 1
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.update(self.source, reading.at(0), self.source.noise(examples))
            torch.cuda.current_stream().wait_stream(side)
            return
        if updates not in self.recorded:
            pool = next((one.graph.pool() for one in self.recorded.values()), None)
            torch.cuda.synchronize()
            self.recorded[updates] = Captured(self.update, self.source, reading, pool)
        self.recorded[updates].replay(reading)
