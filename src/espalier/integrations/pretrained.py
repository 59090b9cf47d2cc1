"""Hugging Face Transformers: a compact model that ``save_pretrained`` wrote is loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from espalier.compact.apply import apply_plan
from espalier.compact.plan import Plan
from espalier.space import BadInput, Corrupt
from espalier.train import checks


def from_pretrained(folder: str | Path) -> Any:
    """The compact model of a folder that its own ``save_pretrained`` wrote, in eval mode.

    folder: with config.json, which holds the plan of the cut, and the weights in safetensors.

    ``AutoModel.from_pretrained`` cannot read it: a configuration has one width for all layers. This builds the uncut
    model of the configuration, cuts it by the plan, and loads the weights.
    """
    transformers = checks.needed("transformers", "this needs transformers: pip install transformers")
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise BadInput(f"{folder} has no config.json; name a folder that save_pretrained of a compact model wrote")
    config = transformers.AutoConfig.from_pretrained(folder)
    plan, names = getattr(config, "espalier_plan", None), config.architectures or []
    if plan is None or not names:
        raise BadInput(f"{folder} holds no compact model: its config.json has no plan; AutoModel reads it")
    del config.espalier_plan
    model: nn.Module = getattr(transformers, names[0])(config)
    small = apply_plan(model.to(_dtype(config)), Plan.from_dict(plan))
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    ours = _names(small)
    tensors = {ours.get(name, name): tensor for name, tensor in stored.items()}
    try:
        missing, unknown = small.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise Corrupt(f"{folder}: the weights do not fit the plan: {str(error).splitlines()[-1].strip()}") from None
    places = small.state_dict(keep_vars=True)
    loaded = {id(places[name]) for name in tensors if name in places}
    made: Any = getattr(small, "_keys_to_ignore_on_save", None) or ()  # by the model itself, as sinusoids of positions
    lacking = [name for name in missing if name not in made and id(places[name]) not in loaded]  # tied: stored once
    if lacking or unknown:
        raise Corrupt(f"{folder} lacks {lacking[:3] or 'nothing'}, and holds {list(unknown)[:3] or 'nothing'} more")
    return small.eval()


def _names(model: nn.Module) -> dict[str, str]:
    """By its name in the file the name of a tensor here: some models are saved under the names of earlier versions."""
    from transformers.core_model_loading import revert_weight_conversion

    here = model.state_dict()
    saved = revert_weight_conversion(model, dict(here))
    names = {id(tensor): name for name, tensor in here.items()}
    return {name: names[id(tensor)] for name, tensor in saved.items() if id(tensor) in names}


def _dtype(config: Any) -> torch.dtype:
    kind = getattr(config, "dtype", None)
    return kind if isinstance(kind, torch.dtype) else torch.float32
