"""Transformers: its Trainer, which shapes the model that it trains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from espalier.cost import Cost
from espalier.integrations.carried import Carried
from espalier.space import BadInput
from espalier.train import Recipe, Result, StructureOptimizer, feed, pytree, shape
from espalier.train.targets import Target

try:
    from transformers import Trainer
except ModuleNotFoundError as missing:
    if (missing.name or "").split(".")[0] not in ("transformers", "accelerate"):
        raise
    text = "espalier.integrations.transformers needs Transformers: pip install 'espalier[transformers]'"
    raise ModuleNotFoundError(text, name=missing.name) from None

__all__ = ["ShapingTrainer"]

LOGGED = ("update", "begun", "settled", "unit_share", "weight_share", "cost_share", "expected_share")
STREAMED = 16  # batches of a stream that BatchNorm's statistics are estimated on


class ShapingTrainer(Trainer):  # type: ignore[misc]
    """A ``transformers.Trainer`` that shapes its model: after ``train()``, ``result`` is what comes out.

    All of the Trainer's own arguments stay, with their meaning: optimiser, rate, schedule, clipping, accumulation,
    evaluation, checkpoints. Each of its steps is one update of weights and structure, by the recipe. Once the structure
    has settled the model runs the compact network, and after ``train()`` it is the network that ships; what
    ``save_model`` writes ``espalier.integrations.pretrained.from_pretrained`` reads. Checkpoints are of the whole
    network; ``train(resume_from_checkpoint=True)`` goes on exactly. One process, without float16.

    target, penalty, cost, samples, recipe, settle: as in :func:`espalier.fit`. structure_seed: of the masks. Under one
        mask a batch is read once, under ``samples`` masks so many times.
    kinds, ignore: as in :func:`espalier.attach`.
    """

    def __init__(
        self,
        *args: Any,
        target: Target | None = None,
        penalty: float | None = None,
        cost: str | Cost | Tensor | Sequence[float] = "weights",
        samples: int | None = None,
        recipe: str | Recipe | None = None,
        settle: float | None = None,
        structure_seed: int = 0,
        kinds: Collection[str] | None = None,
        ignore: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _check(self.args)
        self._settings: dict[str, Any] = {
            "target": target, "penalty": penalty, "cost": cost, "samples": samples, "recipe": recipe,
            "settle": settle, "seed": structure_seed, "kinds": kinds, "ignore": ignore,
        }  # fmt: skip
        self._carried: Carried | None = None
        self._waiting: list[Any] = []  # parts of a batch that accumulates
        self._norm: Tensor | None = None  # of the last gradient, before it was clipped
        self.result: Result | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self.result is not None:
            raise BadInput("this trainer's model is cut already; build a model and a trainer to train anew")
        self._carried, self._waiting = None, []
        try:
            output = super().train(*args, **kwargs)
            self._finish()
        except BaseException:
            self._release()
            raise
        return output

    def _finish(self) -> None:
        carried, self._carried = self._carried, None
        assert carried is not None
        with carried.shaping.whole():
            self.model.train()  # evaluation leaves it in eval mode, in which BatchNorm counts as frozen
        carried.history = list(self.state.log_history)
        self.result = carried.finish()

    def _release(self) -> None:
        if self._carried is not None:
            self._carried.release()
        self._carried = None

    # ---- from here on, what the Trainer calls ------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        inner = super().create_optimizer(*args, **kwargs)
        if self._carried is None:
            collate = self._get_collator_with_removed_columns(self.data_collator, "training")
            batches: Any = DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=collate)
            if isinstance(self.train_dataset, IterableDataset):
                batches = list(islice(batches, STREAMED))
            reading = feed.Batches(batches, _everything)
            example = pytree.each(lambda tensor: tensor.to(self.args.device), reading.example())
            shaping = shape(self.model, example, inner, updates=self.state.max_steps, **self._settings)
            self._carried = Carried(shaping, reading)
            # The Trainer's own call of step finds nothing to do: training_step makes the whole update.
            shaping.step = MethodType(lambda *_: None, shaping)  # type: ignore[method-assign]
            self.optimizer = shaping
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One update; of a batch in parts, once its last part is there."""
        assert self._carried is not None
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._waiting = self._waiting, []
        once: Callable[..., Tensor] = super().training_step

        def closure() -> Tensor:
            loss = torch.stack([once(model, part, num_items_in_batch) for part in parts]).sum()
            if self.args.max_grad_norm > 0:
                self._norm = super(ShapingTrainer, self)._clip_grad_norm(model)
            return loss

        self._carried.before_update()
        return StructureOptimizer.step(self._carried.shaping, closure)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor | None:
        return self._norm  # clipped before the weights moved

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._carried is not None and ("loss" in logs or "eval_loss" in logs):
            row = self._carried.row(self.state.epoch or 0.0)
            logs.update({name: row[name] for name in LOGGED})
        super().log(logs, *args, **kwargs)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self._carried is None:
            super()._save(*args, **kwargs)
            return
        with self._carried.shaping.whole():
            super()._save(*args, **kwargs)


def _everything(item: Any) -> feed.Batch:
    inputs = dict(item)
    return inputs, inputs


def _check(args: Any) -> None:
    """Refuse what the recipe cannot be carried into."""
    if args.world_size > 1 or args.n_gpu > 1:
        raise BadInput(f"ShapingTrainer works in one process on one device, not on {max(args.world_size, args.n_gpu)}")
    if args.fp16:
        raise BadInput("fp16=True scales losses, which slopes would follow; use bf16=True")
    if args.load_best_model_at_end:
        raise BadInput(
            "load_best_model_at_end=True may go back to weights from before the structure settled, which do not fit "
            "what ships; leave it out"
        )
