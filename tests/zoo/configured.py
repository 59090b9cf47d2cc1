"""Models of the `transformers` library at tiny size, built from their configuration: nothing is downloaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .convolutional import images
from .entry import Entry, Inputs

TEXT = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
VISION = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"image_size": 16, "patch_size": 4, "num_labels": 5}
STAGES = {"num_channels": 3, "num_labels": 5}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def configured(model: str, config: str, **settings: Any):
    """The recipe of a model; `transformers` is imported only when it is used."""

    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


def ids(batch: int, length: int, **more: tuple[int, int]):
    def make() -> Inputs:
        inputs = {"input_ids": torch.randint(3, 60, (batch, length))}
        inputs |= {name: torch.randint(3, 60, shape) for name, shape in more.items()}
        return inputs

    return make


def padded(batch: int, length: int):
    """Token ids whose last sequence is half padding."""

    def make() -> Inputs:
        attention_mask = torch.ones(batch, length, dtype=torch.long)
        attention_mask[-1, length // 2 :] = 0
        return {"input_ids": torch.randint(3, 60, (batch, length)), "attention_mask": attention_mask}

    return make


def pixels(batch: int, size: int):
    return lambda: {"pixel_values": images(batch, size)()}


def speech(batch: int):
    def make() -> Inputs:
        features = torch.randn(batch, 8, 32, dtype=torch.float64)
        return {"input_features": features, "decoder_input_ids": torch.randint(3, 60, (batch, 5))}

    return make


def two_towers(batch: int, length: int):
    def make() -> Inputs:
        return {"input_ids": torch.randint(3, 60, (batch, length)), "pixel_values": images(batch, 16)()}

    return make


def entry(name, family, make, example, others, fixed=()):
    return Entry(name, family, make, example, tuple(others), tuple(fixed), source="transformers")


GPT2 = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32} | ENDS
LLAMA = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
T5 = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 96, "num_layers": 2, "num_heads": 4, "use_cache": False}
WHISPER = {
    "vocab_size": 60,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
DISTILBERT = {"vocab_size": 60, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 96, "num_labels": 5}
NEOX = TEXT | {"max_position_embeddings": 64, "use_cache": False}
OPT = {
    "vocab_size": 60,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 96,
    "max_position_embeddings": 64,
    "use_cache": False,
}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
RESNET = {"embedding_size": 24, "hidden_sizes": [48, 96], "depths": [2, 2], "layer_type": "bottleneck"}
REGNET = {"embedding_size": 24, "hidden_sizes": [48, 96], "depths": [2, 2], "groups_width": 4, "layer_type": "y"}
CONVNEXT = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1], "num_labels": 5}
TOWER = {k: v for k, v in TEXT.items() if k != "vocab_size"} | {"projection_dim": 24}
WORDS = TOWER | ENDS | {"vocab_size": 60, "max_position_embeddings": 16}

IDS = (ids(3, 9), padded(2, 8))
ENTRIES = [
    entry(
        "BERT",
        "transformer",
        configured("BertForSequenceClassification", "BertConfig", **TEXT, num_labels=5),
        padded(2, 7),
        IDS,
        ("classifier",),
    ),
    entry("GPT-2", "transformer", configured("GPT2LMHeadModel", "GPT2Config", **GPT2), ids(2, 7), IDS, ("wte",)),
    entry("Llama", "transformer", configured("LlamaForCausalLM", "LlamaConfig", **LLAMA), ids(2, 7), IDS, ("lm_head",)),
    entry(
        "ViT",
        "transformer",
        configured("ViTForImageClassification", "ViTConfig", **VISION),
        pixels(2, 16),
        (pixels(3, 16),),
        ("patch_embeddings", "classifier"),
    ),
    entry(
        "ConvNeXt",
        "transformer",
        configured("ConvNextForImageClassification", "ConvNextConfig", **CONVNEXT),
        pixels(2, 32),
        (pixels(3, 48),),
        ("embeddings", "downsampling", "dwconv", "classifier"),
    ),
    entry(
        "ResNet",
        "cnn",
        configured("ResNetForImageClassification", "ResNetConfig", **STAGES, **RESNET),
        pixels(3, 24),
        (pixels(2, 32),),
    ),
    entry(
        "RegNet",
        "cnn",
        configured("RegNetForImageClassification", "RegNetConfig", **STAGES, **REGNET),
        pixels(3, 24),
        (pixels(2, 32),),
    ),
    entry(
        "MobileNetV2",
        "cnn",
        configured("MobileNetV2ForImageClassification", "MobileNetV2Config", num_labels=5, depth_multiplier=0.25),
        pixels(3, 32),
        (pixels(2, 40),),
    ),
    entry(
        "Swin",
        "transformer",
        configured("SwinForImageClassification", "SwinConfig", **STAGES, **SWIN),
        pixels(2, 16),
        (pixels(3, 16),),
        ("patch_embeddings", "downsample", "classifier"),
    ),
    entry(
        "T5",
        "transformer",
        configured("T5ForConditionalGeneration", "T5Config", **T5),
        ids(2, 7, decoder_input_ids=(2, 5)),
        (ids(3, 9, decoder_input_ids=(3, 4)),),
        ("shared",),
    ),
    entry(
        "DistilBERT",
        "transformer",
        configured("DistilBertForSequenceClassification", "DistilBertConfig", **DISTILBERT),
        ids(2, 7),
        IDS,
        ("^classifier",),
    ),
    entry(
        "Mistral",
        "transformer",
        configured("MistralForCausalLM", "MistralConfig", **LLAMA, sliding_window=4),
        ids(2, 7),
        IDS,
        ("lm_head",),
    ),
    entry(
        "Whisper",
        "transformer",
        configured("WhisperModel", "WhisperConfig", **WHISPER),
        speech(2),
        (speech(3),),
        ("conv2",),
    ),
    entry(
        "ALBERT, one layer shared",
        "transformer",
        configured("AlbertForSequenceClassification", "AlbertConfig", **TEXT, embedding_size=16, num_labels=5),
        ids(2, 7),
        IDS,
        ("embedding_hidden_mapping", "classifier"),
    ),
    entry(
        "GPT-NeoX, interleaved query-key-value",
        "transformer",
        configured("GPTNeoXForCausalLM", "GPTNeoXConfig", **NEOX),
        ids(2, 7),
        IDS,
        ("lm_head",),
    ),
    entry("OPT", "transformer", configured("OPTForCausalLM", "OPTConfig", **OPT), ids(2, 7), IDS, ("embed_tok",)),
    entry(
        "Qwen3, normed queries and keys",
        "transformer",
        configured("Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=8),
        ids(2, 7),
        IDS,
        ("lm_head",),
    ),
    entry(
        "EfficientNet",
        "cnn",
        configured(
            "EfficientNetForImageClassification",
            "EfficientNetConfig",
            num_labels=5,
            width_coefficient=0.25,
            depth_coefficient=0.3,
            hidden_dim=320,
        ),
        pixels(3, 32),
        (pixels(2, 40),),
        (),
    ),
    entry(
        "CLIP, two towers",
        "transformer",
        configured(
            "CLIPModel",
            "CLIPConfig",
            text_config=WORDS,
            vision_config=TOWER | {"image_size": 16, "patch_size": 4},
            projection_dim=24,
        ),
        two_towers(2, 7),
        (two_towers(3, 5),),
        ("patch_embedding", "projection"),
    ),
]


def wide(name: str, tolerance: float = 1e-9) -> Entry:
    """One of them with the width of its residual stream gated too; then nothing of it is fixed."""
    found = next(entry for entry in ENTRIES if entry.name == name)
    kinds = (*found.kinds, "width")
    return replace(found, name=f"{name}, width too", fixed=(), kinds=kinds, tolerance=tolerance)


ENTRIES += [wide("BERT"), wide("GPT-2"), wide("ViT"), wide("Llama", 1e-5)]
