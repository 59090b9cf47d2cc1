"""Transformers: its Trainer with the recipe in it, to the last bit what an own loop gives; its checkpoints resume."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier import BadInput, attach, load, save, shape

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from espalier.integrations.pretrained import from_pretrained  # noqa: E402
from espalier.integrations.transformers import ShapingTrainer  # noqa: E402

IDS = torch.randint(3, 60, (320, 9), generator=torch.Generator().manual_seed(0))
LABELS = ((IDS >= 32).sum(1) > 4).long()
DATA = [{"input_ids": ids, "labels": label} for ids, label in zip(IDS, LABELS)]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def bert(dropout: float = 0.0, **sizes: int) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, num_labels=2,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **sizes,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def trainer(
    folder: Path, model: Any, optimizer: Any = None, target: float = 0.5, shaping: Any = None, **settings: Any
) -> ShapingTrainer:
    usual: dict[str, Any] = {
        "num_train_epochs": 4, "per_device_train_batch_size": 32, "learning_rate": 3e-3, "report_to": [],
        "save_strategy": "no", "logging_strategy": "epoch", "disable_tqdm": True, "use_cpu": True,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(folder), **usual | settings)
    given = {} if optimizer is None else {"optimizers": (optimizer, None)}
    given |= shaping or {}
    return ShapingTrainer(model, arguments, train_dataset=DATA, eval_dataset=DATA, target=target, **given)


def same(ours: Any, theirs: Any) -> None:
    assert ours.theta.equal(theirs.theta)
    assert ours.mask.equal(theirs.mask)
    state, expected = ours.model.state_dict(), theirs.model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert tensor.equal(expected[name]), name


@pytest.mark.parametrize(("parts", "settings"), [(1, {}), (2, {}), (1, {"recipe": "ranked", "samples": 3})])
def test_it_is_an_own_loop_to_the_last_bit(parts: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """A batch in one part, or in two whose gradients accumulate; clipped, by an optimiser of one's own; by slopes, or
    by the order of three losses."""
    model = bert()
    training = trainer(
        tmp_path, model, torch.optim.AdamW(model.parameters(), 3e-3), shaping=settings, lr_scheduler_type="constant",
        max_grad_norm=0.5, train_sampling_strategy="sequential", per_device_train_batch_size=32 // parts,
        gradient_accumulation_steps=parts,
    )  # fmt: skip
    training.train()

    own = bert()
    shaping = shape(
        own, {"input_ids": IDS[:4], "labels": LABELS[:4]}, torch.optim.AdamW(own.parameters(), 3e-3), updates=40,
        target=0.5, **settings,
    )  # fmt: skip
    assert shaping.search.samples == settings.get("samples", 1)

    def closure(ids: Tensor, labels: Tensor) -> Tensor:
        losses = []
        for x, y in zip(ids.chunk(parts), labels.chunk(parts)):
            loss = shaping.network(input_ids=x, labels=y).loss  # which the Trainer adds up, for this model
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(shaping.network.parameters(), 0.5)
        return torch.stack(losses).sum()

    own.train()
    for _ in range(4):
        for ids, labels in zip(IDS.split(32), LABELS.split(32)):
            shaping.step(closure, ids, labels)
    assert training.result is not None
    same(training.result, shaping.finish({"input_ids": IDS, "labels": LABELS}))
    logged = [row for row in training.result.history if "loss" in row]
    assert [row["update"] for row in logged] == [10, 20, 30, 40]
    assert [row["settled"] for row in logged] == [False, False, True, True]
    assert logged[-1]["loss"] < logged[0]["loss"]


def test_the_model_is_what_ships_in_the_end(tmp_path: Path) -> None:
    model = bert()
    training = trainer(tmp_path, model, num_train_epochs=8)
    training.train()
    assert training.result is not None
    share = sum(p.numel() for p in model.bert.encoder.parameters()) / sum(
        p.numel() for p in bert().bert.encoder.parameters()
    )
    assert share < 0.7
    with torch.no_grad():
        assert model(IDS).logits.equal(training.result.model(IDS).logits)
    assert training.evaluate(DATA)["eval_loss"] < 0.6
    save(training.result.model, tmp_path / "small")
    again = load(tmp_path / "small", bert).eval()
    training.save_model(tmp_path / "saved")  # by Transformers, of the model it holds
    assert from_pretrained(tmp_path / "saved")(IDS[:8]).logits.equal(model(IDS[:8]).logits)
    assert again(IDS[:8]).logits.equal(model(IDS[:8]).logits)
    with pytest.raises(BadInput, match="cut already"):
        training.train()


@pytest.mark.parametrize("update", [15, 35])  # inside an epoch: while it searches, and once it is settled
def test_killed_and_resumed_it_is_the_same_run(update: int, tmp_path: Path) -> None:
    """With dropout and shuffling."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5}
    whole = trainer(tmp_path / "whole", bert(0.1))
    whole.train()

    class Killed(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == update + 2:
                raise ZeroDivisionError

    first = trainer(tmp_path / "run", bert(0.1), **settings)
    first.add_callback(Killed())
    with pytest.raises(ZeroDivisionError):
        first.train()
    second = trainer(tmp_path / "run", bert(0.1), **settings)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 40
    same(second.result, whole.result)
    plain = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "run" / f"checkpoint-{update}")
    assert plain.bert.pooler.dense.weight.shape == (16, 16)  # the checkpoint is of the whole network


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fp16": True}, "fp16=True"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}, "load_best_model"),
    ],
)
def test_what_it_cannot_do_is_named(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((BadInput, ValueError), match=said):
        trainer(tmp_path, bert(), **settings)


@pytest.mark.parametrize(("name", "constant"), [("bert", 0.69), ("gpt2", 2.99), ("vit", 2.30)])
def test_the_examples(name: str, constant: float) -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "with_transformers.py"))
    torch.manual_seed(0)
    training = example[name]()
    assert training.result.share_after <= 0.4
    assert training.evaluate()["eval_loss"] < 0.6 * constant


def test_the_snippet_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    (code,) = re.findall(r"```python\n(from espalier\.integrations\.transformers.*?)```", page, re.DOTALL)
    model = bert(max_position_embeddings=16)
    names: dict[str, Any] = {"model": model, "arguments": trainer(tmp_path, bert()).args, "data": DATA}
    exec(compile(code, "docs/frameworks.md", "exec"), names)
    assert names["trainer"].result.share_after <= 0.4


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def test_positions_that_the_model_makes_itself_are_not_stored(tmp_path):
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in SIZES.items()}
    config = transformers.MarianConfig(
        **sizes, vocab_size=30, d_model=16, max_position_embeddings=8, decoder_start_token_id=1, **ENDS, use_cache=False
    )
    inputs = {"input_ids": torch.randint(3, 30, (2, 5)), "decoder_input_ids": torch.randint(3, 30, (2, 4))}
    gated = attach(transformers.MarianMTModel(config), inputs)
    small = gated.compact((torch.rand(gated.d) < 0.5).float()).eval()
    small.save_pretrained(tmp_path)
    assert from_pretrained(tmp_path)(**inputs).logits.equal(small(**inputs).logits)
