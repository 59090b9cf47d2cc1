"""Run by itself, without Espalier: loads what was shipped in each folder and compares it with the outputs beside it."""

import importlib.util
import json
import sys
from pathlib import Path


class Blocked:
    """Refuses to import Espalier, however it is installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "espalier":
            raise ImportError(f"{name} was asked for in a process that must do without it")
        return None


sys.meta_path.insert(0, Blocked())

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


def apart(outputs, expected):
    worst = 0.0
    for ours, theirs in zip(outputs, expected, strict=True):
        ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
        assert ours.shape == theirs.shape
        worst = max(worst, float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
    return worst


def numbered(tensors, letter):
    return [tensors[name] for name in sorted(tensors) if name.startswith(letter)]


report = {}
for folder in map(Path, sys.argv[1:]):
    tensors = load_file(folder / "expected.safetensors")
    given, expected = numbered(tensors, "i"), [t.numpy() for t in numbered(tensors, "o")]
    spec = importlib.util.spec_from_file_location("network", folder / "network.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with torch.no_grad():
        model = module.load()
        python = [t.numpy() for t in torch.utils._pytree.tree_leaves(model(*given))]
        program = torch.export.load(folder / "model.pt2").module()
        exported = [t.numpy() for t in torch.utils._pytree.tree_leaves(program(*given))]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    fed = {want.name: tensor.numpy() for want, tensor in zip(session.get_inputs(), given, strict=True)}
    report[folder.name] = {
        "python": apart(python, expected),
        "pt2": apart(exported, expected),
        "onnx": apart(session.run(None, fed), expected),
        "classes": sorted({f"{type(m).__module__}.{type(m).__name__}" for m in model.modules()} - {"network.Network"}),
    }
assert not [name for name in sys.modules if name.partition(".")[0] == "espalier"]
print(json.dumps(report))
