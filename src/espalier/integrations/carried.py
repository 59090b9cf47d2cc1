"""A recipe inside somebody else's training loop, which holds the model and cannot be handed another one.

Once the structure has settled the model itself runs the compact network: its insides are exchanged, and its
``state_dict`` stays that of the whole network, so that the loop's own checkpoints can be loaded into a new model.
"""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from espalier.compact.apply import PLAN_OF, keep_plan
from espalier.files import clean
from espalier.train import feed
from espalier.train.optimizer import StructureOptimizer
from espalier.train.result import Result, Row
from espalier.train.settled import Insides


class Carried:
    """What an integration asks of a recipe: settle at its time, a row for each epoch, and the result at the end.

    reading: the batches that are trained on. in_place: whether the model runs the compact network once settled; else
    it goes on masked.
    """

    def __init__(self, shaping: StructureOptimizer, reading: feed.Feed, in_place: bool = True) -> None:
        assert shaping.phases is not None
        self.shaping, self.reading, self.phases, self.in_place = shaping, reading, shaping.phases, in_place
        self.model = shaping.gated.model
        self.history: list[Row] = []
        self.began = time.monotonic()

        def whole_state(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
            if module is self.model and shaping.settled is not None and shaping.settled.inside:
                with self.shaping.whole():
                    whole = module.state_dict(prefix=prefix)  # this hook then finds it whole
                state.clear()
                state.update(whole)

        # A function, not a method: copies of the model copy its hooks, and what a method is of.
        self._hook = self.model.register_state_dict_post_hook(whole_state)  # type: ignore[no-untyped-call]

    def before_update(self) -> None:
        """Settle where it is time; also after a state was loaded that had."""
        shaping = self.shaping
        if shaping.update >= self.phases.settle and not shaping.search.settled:
            shaping.settle() if self.in_place else shaping.search.settle()
        if shaping.settled is not None:
            shaping.settled.enter()

    def row(self, epoch: float, **more: float) -> Row:
        """A row for a history, with the names that ``fit`` has; more: what the loop has measured itself."""
        with self.shaping.whole():
            about = self.shaping.row(epoch)
        row: Row = clean(about | more | {"seconds": round(time.monotonic() - self.began, 3)})
        return row

    def finish(self) -> Result:
        """The result. From here on a model that ran the compact network in place is the one that ships."""
        shaping = self.shaping
        if shaping.settled is not None:
            shaping.settled.leave()
        self._hook.remove()
        about: dict[str, Any] = {"history": self.history, "seconds": time.monotonic() - self.began}
        result = replace(shaping.finish(self.reading, **about), gated=None)
        self.release()
        if self.in_place and type(result.model) is type(self.model):
            Insides(self.model, copy.deepcopy(result.model)).exchange()
            keep_plan(self.model, copy.deepcopy(getattr(result.model, PLAN_OF)))
            self.model.eval()
        return result

    def release(self) -> None:
        """Take gates and hook off the model, which is the whole network then."""
        if self.shaping.settled is not None:
            self.shaping.settled.leave()
        self._hook.remove()
        getattr(self.shaping.gated, "detach", lambda: None)()
