"""A recipe inside somebody else's training loop, which holds the model and cannot be handed another one.

Once the structure has settled the model itself runs the compact network: its insides are exchanged, and its
``state_dict`` stays that of the whole network, so that the loop's own checkpoints can be loaded into a new model.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from espalier.compact.apply import PLAN_OF, keep_plan
from espalier.files import clean
from espalier.space import BadInput
from espalier.train import feed
from espalier.train.optimizer import StructureOptimizer
from espalier.train.result import Result, Row

HELD = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_forward_pre_hooks", "_forward_hooks",
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip


class Insides:
    """The insides of a compact network in the model that it was cut from; out of it again they leave no trace."""

    def __init__(self, model: nn.Module, small: nn.Module) -> None:
        if type(small) is not type(model):
            raise BadInput(f"{type(model).__name__} is one layer, which the cut replaces; put it into a module")
        plan: Mapping[str, Any] = small.__dict__["espalier_plan"]
        names = {*HELD, *(name for name in plan["attributes"] if "." not in name)}
        names |= {name for name, value in small.__dict__.items() if _holds_modules(value)}
        self.model, self.inside = model, False
        self._other = {name: small.__dict__[name] for name in names}

    def exchange(self) -> None:
        own = self.model.__dict__
        self._other, held = {name: own[name] for name in self._other}, self._other
        own.update(held)
        self.inside = not self.inside


def _holds_modules(value: object) -> bool:
    """Whether it is a list, tuple or dict with a module in it, which is no child of the module that holds it."""
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(isinstance(v, nn.Module) or _holds_modules(v) for v in value)


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
        self.insides: Insides | None = None
        self.began = time.monotonic()

        def whole_state(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
            if module is self.model and self.insides is not None and self.insides.inside:
                with self.whole():
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
        if shaping.settled is not None and self.insides is None:
            self.insides = Insides(self.model, shaping.settled.small)
            self.insides.exchange()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model is the whole network again, with what was trained."""
        inside = self._put_whole()
        try:
            self.shaping.write_back()
            yield
        finally:
            if inside is not None:
                inside.exchange()

    def _put_whole(self) -> Insides | None:
        """The whole network in the model's place; what was exchanged for it, if anything was."""
        if self.insides is None or not self.insides.inside:
            return None
        self.insides.exchange()
        return self.insides

    def row(self, epoch: float, **more: float) -> Row:
        """A row for a history, with the names that ``fit`` has; more: what the loop has measured itself."""
        with self.whole():
            about = self.shaping.row(epoch)
        row: Row = clean(about | more | {"seconds": round(time.monotonic() - self.began, 3)})
        return row

    def finish(self) -> Result:
        """The result. From here on a model that ran the compact network in place is the one that ships."""
        self._put_whole()
        self._hook.remove()
        shaping = self.shaping
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
        self._put_whole()
        self.shaping.write_back()
        self._hook.remove()
        getattr(self.shaping.gated, "detach", lambda: None)()
