"""Which optimiser trains the weights where none is given: the recipe's SGD, or AdamW where that is the better start."""

from __future__ import annotations

from torch import nn

from espalier.train import pytree
from espalier.train.batched.optimizers import Adam, AdamW
from espalier.train.pytree import Nested
from espalier.train.recipes import PRESETS, Recipe

# AdamW's rate over that of the recipe's SGD. Chosen on held-out data of many tasks; see docs/recipe.md.
OTHERS, NORMED = 0.1, 0.03
WORDS = ("LayerNorm", "RMSNorm", "Attention")  # layers of other libraries are known by their names


def usual(recipe: Recipe, model: nn.Module, targets: Nested = None) -> Adam | None:
    """AdamW's settings for a run of these targets; None: the recipe's own SGD.

    SGD is for classes and networks without LayerNorm, attention or recurrent layers. A recipe with numbers of one's own
    for the weights, and the paper's, are taken as they are. targets: None where they are not known.
    """
    if not any(_weights(recipe) == _weights(known) for name, known in PRESETS.items() if name != "paper"):
        return None
    layers = list(model.modules())
    if any(any(word in type(layer).__name__ for word in WORDS) for layer in layers):
        return AdamW(round(NORMED * recipe.weights_learning_rate, 12))
    numbers = targets is not None and any(tensor.is_floating_point() for tensor in pytree.tensors(targets))
    if numbers or any(isinstance(layer, nn.RNNBase) for layer in layers):
        return AdamW(round(OTHERS * recipe.weights_learning_rate, 12))
    return None


def _weights(recipe: Recipe) -> tuple[object, ...]:
    return recipe.weights_learning_rate, recipe.momentum, recipe.weight_decay, recipe.drops
