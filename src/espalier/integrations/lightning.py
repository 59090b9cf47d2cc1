"""Lightning: a callback that shapes an ordinary LightningModule while the Trainer trains it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from espalier.cost import Cost
from espalier.integrations.carried import Carried
from espalier.space import BadInput
from espalier.train import Recipe, Result, feed, pytree, shape
from espalier.train.descent import Optimizer, Schedule
from espalier.train.feed import Adapter
from espalier.train.loop import random_states, restore_random
from espalier.train.recipes import OptimizerFactory
from espalier.train.targets import Target

try:
    from lightning.pytorch import Callback, Trainer, strategies
    from lightning.pytorch import LightningModule as Module
except ModuleNotFoundError as missing:
    if (missing.name or "").split(".")[0] != "lightning":
        raise
    text = "espalier.integrations.lightning needs Lightning: pip install 'espalier[lightning]'"
    raise ModuleNotFoundError(text, name="lightning") from None

__all__ = ["Shaping"]

AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")  # callbacks, of which some versions have one


class Shaping(Callback):  # type: ignore[misc]
    """Shapes the module that ``Trainer(callbacks=[Shaping(target=0.3)])`` trains; ``result`` is what comes out.

    The module needs automatic optimisation, one optimiser, and a ``forward`` that its ``training_step`` calls. Gates
    are attached as the fit starts. Its optimiser and schedulers stay; each of its steps is one update of weights and
    structure, by the recipe. Once the structure has settled the module runs the compact network, and after the fit it
    is the network that ships. Lightning's checkpoints hold all of it; ``trainer.fit(module, ckpt_path=...)`` goes on.

    target, penalty, cost, samples, recipe, settle, seed: as in :func:`espalier.fit`. Under one mask a batch is read
    once, under ``samples`` masks so many times.
    optimizer, schedule: instead of the module's: as in :func:`espalier.shape`; "recipe" for the recipe's own.
    example: inputs of ``forward`` to attach gates with. Default: the module's ``example_input_array``, else those of
        the first batch. batch: makes ``(inputs, targets)`` of a batch, as in ``fit``.
    kinds, ignore: as in :func:`espalier.attach`.
    """

    def __init__(
        self,
        *,
        target: Target | None = None,
        penalty: float | None = None,
        cost: str | Cost | Tensor | Sequence[float] = "weights",
        samples: int | None = None,
        recipe: str | Recipe | None = None,
        settle: float | None = None,
        seed: int = 0,
        optimizer: str | Optimizer | OptimizerFactory | None = None,
        schedule: str | Schedule | None = None,
        example: Any = None,
        batch: Adapter | None = None,
        kinds: Collection[str] | None = None,
        ignore: Collection[str] = (),
    ) -> None:
        self._settings: dict[str, Any] = {
            "target": target, "penalty": penalty, "cost": cost, "samples": samples, "recipe": recipe,
            "settle": settle, "seed": seed, "schedule": schedule, "kinds": kinds, "ignore": ignore,
        }  # fmt: skip
        self._optimizer, self._example = optimizer, example
        self._adapt = feed.adapter(batch, own_loss=False)
        self._carried: Carried | None = None
        self._loaded: dict[str, Any] | None = None  # of a checkpoint
        self._call: RemovableHandle | None = None  # waits for the first call of forward, where there must be one
        self.result: Result | None = None

    # ---- from here on, Lightning's words -----------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: Module) -> None:
        self.result = None
        several = _checked(trainer, pl_module)
        updates = trainer.estimated_stepping_batches
        if updates in (-1, float("inf")):
            raise BadInput("the recipe needs to know how long the run is: give the Trainer max_epochs or max_steps")
        trainer.fit_loop.setup_data()  # where max_steps alone says how long the run is, nobody has yet
        reading = feed.Batches(trainer.train_dataloader, self._adapt)
        example = self._example
        if example is None:
            example = reading.example() if pl_module.example_input_array is None else pl_module.example_input_array
        example = trainer.strategy.broadcast(pytree.each(lambda t: t.to(pl_module.device), example))
        optimizer: Any = trainer.optimizers[0]
        if self._optimizer is not None:
            if trainer.lr_scheduler_configs:
                raise BadInput("Shaping(optimizer=) replaces the module's, which has a scheduler; give one of them")
            optimizer = None if self._optimizer == "recipe" else self._optimizer
        shaping = shape(pl_module, example, optimizer, updates=int(updates), parallel="none", **self._settings)
        if several:
            shaping.across = lambda numbers: trainer.strategy.reduce(numbers, reduce_op="mean")
        trainer.strategy.optimizers = [shaping]
        self._carried = Carried(shaping, reading, in_place=not several)
        if self._loaded is not None:
            self._carried.history = list(self._loaded["history"])
        gated: Any = shaping.gated
        fused = next((spot.raw_names[0] for spot in gated._installed.spots if spot.raw), None)
        if fused is not None and several:
            raise BadInput(f"masks act on {fused} when forward is called, which several processes do not do; use one")
        if fused is not None:
            self._call = pl_module.register_forward_pre_hook(lambda *_: self._forget_call())

    def _forget_call(self) -> None:
        if self._call is not None:
            self._call.remove()
            self._call = None

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            restore_random(loaded["random"], pl_module.device)
            # Lightning makes the loader's iterator before this moment; made after it, it would have drawn its seed.
            torch.empty((), dtype=torch.int64).random_()

    def on_train_batch_start(self, trainer: Trainer, pl_module: Module, batch: Any, _: int) -> None:
        assert self._carried is not None
        self._carried.before_update()

    def on_after_backward(self, trainer: Trainer, pl_module: Module) -> None:
        if self._call is not None:
            raise BadInput("training_step has to call self(...): masks of shared or fused weights act on forward")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        assert self._carried is not None
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._carried.history.append(self._carried.row(trainer.current_epoch + 1, **numbers))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        if self._carried is not None:  # else nothing was trained
            checkpoint["espalier"] = {"history": self._carried.history, "random": random_states(pl_module.device)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: Module, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("espalier")

    def on_train_end(self, trainer: Trainer, pl_module: Module) -> None:
        _after(pl_module, "on_train_end", lambda: self._end(trainer))

    def on_fit_end(self, trainer: Trainer, pl_module: Module) -> None:
        self._end(trainer)  # a run that was at its end already is not trained

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        _after(trainer.strategy, "on_exception", self._leave)

    def _leave(self) -> None:
        self._forget_call()
        if self._carried is not None:
            self._carried.release()
            self._carried = None

    def _end(self, trainer: Trainer) -> None:
        carried, self._carried = self._carried, None
        if carried is None:
            return
        result = carried.finish()
        if trainer.world_size > 1:  # statistics of BatchNorm are those of the first process
            result.model.load_state_dict(trainer.strategy.broadcast(result.model.state_dict()))
        self.result = result


def _after(owner: Any, hook: str, do: Callable[[], None]) -> None:
    """Do it behind the owner's own hook. That comes after those of all callbacks, some of which save checkpoints."""
    own = getattr(owner, hook)

    def last(*args: Any) -> None:
        owner.__dict__.pop(hook, None)
        own(*args)
        do()

    owner.__dict__[hook] = last


def _checked(trainer: Trainer, module: Module) -> bool:
    """Refuse what the recipe cannot be carried into; whether there are several processes."""
    if not module.automatic_optimization:
        raise BadInput("Shaping works with automatic optimisation; in a loop of your own use espalier.shape")
    if len(trainer.optimizers) != 1:
        raise BadInput(f"Shaping works with one optimiser, not {len(trainer.optimizers)}")
    if trainer.accumulate_grad_batches != 1:
        raise BadInput(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: Lightning adds up gradients outside of the "
            "optimiser's step, under no mask; use a larger batch, or espalier.shape with a closure that accumulates"
        )
    for callback in trainer.callbacks:
        if any(kind.__name__ in AVERAGING for kind in type(callback).__mro__):
            raise BadInput(
                f"{type(callback).__name__} averages the weights of the whole network, which is cut on the way; do it "
                "in a loop of your own, once the structure has settled (docs/training.md)"
            )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise BadInput(f"precision {trainer.precision!r} scales losses, which slopes would follow; use 'bf16-mixed'")
    if isinstance(trainer.strategy, strategies.SingleDeviceStrategy):
        return False
    if type(trainer.strategy) is strategies.DDPStrategy:
        return bool(trainer.world_size > 1)
    name = type(trainer.strategy).__name__
    raise BadInput(f"Shaping works on one device or with strategy='ddp', not with {name}")
