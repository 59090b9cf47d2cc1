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


def in_onnx(folder, given):
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return session.run(None, {want.name: one.numpy() for want, one in zip(session.get_inputs(), given, strict=True)})


def in_torch(network, given):
    with torch.no_grad():
        return [t.numpy() for t in torch.utils._pytree.tree_leaves(network(*given))]


report = {}
for folder in map(Path, sys.argv[1:]):
    tensors = load_file(folder / "expected.safetensors")
    given, expected = numbered(tensors, "i"), [t.numpy() for t in numbered(tensors, "o")]
    told = report[folder.name] = {"onnx": apart(in_onnx(folder, given), expected)}
    if (folder / "model.pt2").exists():
        told["pt2"] = apart(in_torch(torch.export.load(folder / "model.pt2").module(), given), expected)
    if (folder / "network.py").exists():
        spec = importlib.util.spec_from_file_location("network", folder / "network.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        network = module.load()
        told["python"] = apart(in_torch(network, given), expected)
        classes = {f"{type(m).__module__}.{type(m).__name__}" for m in network.modules()}
        told["classes"] = sorted(classes - {"network.Network"})
assert not [name for name in sys.modules if name.partition(".")[0] == "espalier"]
print(json.dumps(report))
