"""Three models of Transformers, built from their configurations, trained and shaped by its Trainer. CPU, a minute.

BERT says whether more of its tokens are large than small, GPT-2 writes sequences that count, ViT reads digits.
`pip install "espalier[transformers]"`
"""

import sys
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import espalier
from espalier.integrations.transformers import ShapingTrainer

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def rows(**columns: Tensor) -> list[dict[str, Tensor]]:
    """A dataset: one dict for each example."""
    return [dict(zip(columns, values)) for values in zip(*columns.values())]


def bert() -> ShapingTrainer:
    ids = torch.randint(3, 60, (640, 13))
    data = rows(input_ids=ids, labels=((ids >= 32).sum(1) > 6).long())
    model = BertForSequenceClassification(BertConfig(vocab_size=60, num_labels=2, **SIZES))
    return trained(model, data, target=0.4)


def gpt2() -> ShapingTrainer:
    ids = (torch.randint(0, 20, (640, 1)) + torch.randint(1, 4, (640, 1)) * torch.arange(12)) % 20
    config = GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=12, bos_token_id=0, eos_token_id=0)
    return trained(GPT2LMHeadModel(config), rows(input_ids=ids, labels=ids), target=0.4)


def vit() -> ShapingTrainer:
    images, labels = espalier.data.load("digits").as_floats().train
    data = rows(pixel_values=images.reshape(-1, 1, 8, 8)[:1024], labels=labels[:1024])
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **SIZES))
    return trained(model, data, target=0.4)


def trained(model: Any, data: list[dict[str, Tensor]], target: float) -> ShapingTrainer:
    arguments = TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=10, per_device_train_batch_size=32, learning_rate=3e-3, report_to=[],
        save_strategy="no", logging_strategy="epoch", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = ShapingTrainer(model, arguments, train_dataset=data[128:], eval_dataset=data[:128], target=target)
    trainer.train()
    return trainer


if __name__ == "__main__":
    for name in sys.argv[1:] or ["bert", "gpt2", "vit"]:
        torch.manual_seed(0)
        trainer = {"bert": bert, "gpt2": gpt2, "vit": vit}[name]()
        print(f"{name}: {trainer.result}, loss on held-out data {trainer.evaluate()['eval_loss']:.3f}")
        print(trainer.result.table())
