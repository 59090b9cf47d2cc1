"""Which optimiser trains the weights where none is given: the recipe's SGD, or AdamW where that is the better start."""

from __future__ import annotations

from torch import nn

from espalier.train import pytree
from espalier.train.batched.optimizers import Adam, AdamW
from espalier.train.pytree import Nested
from espalier.train.recipes import PRESETS, Recipe

# AdamW's rate over that of the recipe's SGD. Chosen on held-out data of many tasks; see docs/recipe.md.
OTHERS, SEQUENCES = 0.1, 0.03


def usual(recipe: Recipe, model: nn.Module, targets: Nested = None) -> Adam | None:
    """AdamW's settings for a run of these targets; None: the recipe's own SGD.

    SGD is for classes and networks without LayerNorm, attention or recurrent layers. A recipe with numbers of one's own
    for the weights, and the paper's, are taken as they are. targets: None where they are not known.
    """
    if not any(_weights(recipe) == _weights(known) for name, known in PRESETS.items() if name != "paper"):
        return None
    if _reads_sequences(model):
        return AdamW(round(SEQUENCES * recipe.learning_rate, 12))
    if targets is not None and any(tensor.is_floating_point() for tensor in pytree.tensors(targets)):
        return AdamW(round(OTHERS * recipe.learning_rate, 12))
    return None


def _weights(recipe: Recipe) -> tuple[object, ...]:
    return recipe.learning_rate, recipe.momentum, recipe.weight_decay, recipe.drops


def _reads_sequences(model: nn.Module) -> bool:
    """Whether it has LayerNorm, attention or recurrent layers; also of other libraries, by their names."""
    kinds = (nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.RNNBase)
    words = ("LayerNorm", "RMSNorm", "Attention")
    return any(isinstance(m, kinds) or any(word in type(m).__name__ for word in words) for m in model.modules())
