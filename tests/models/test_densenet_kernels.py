"""The fast DenseNet step's kernels: interpreted and compiled where there is no GPU, and run where there is one."""

import copy
import json
import os
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from test_densenet_fast import Problem

ROOT = Path(__file__).resolve().parents[2]


def finished(*command, **environment):
    """What a process of its own printed: neither mode of Triton can be left again."""
    pytest.importorskip("triton")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run([sys.executable, "-W", "ignore", *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return json.loads(done.stdout)


INTERPRETED = """
import json, sys
import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# As a GPU has it: the maximum with NaN is the other number, and bfloat16 is multiplied as what it stands for.
InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
product = InterpreterBuilder.create_dot

def widened(t):
    if t.dtype.scalar != tl.bfloat16:
        return t
    return TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

InterpreterBuilder.create_dot = lambda self, a, b, *more: product(self, widened(a), widened(b), *more)

sys.path.insert(0, sys.argv[1])
from test_densenet_fast import Problem
from espalier.models.densenet_fast import FastDenseNet
from espalier.models.densenet_fast.launch import TritonOperations, Tuning


def operations(precision):
    return TritonOperations(tuning=lambda *_: Tuning(32, 2, stages=1, splits=12, rows=int(sys.argv[2])))


problem = Problem(images=2, depth=7, dtype=torch.float32)
exact, losses, wrong = problem.fast("float32")

def apart(grads, theirs=exact):
    a, b = (torch.cat([g[name].flatten() for name in theirs]) for g in (grads, theirs))
    return float((a - b).norm() / b.norm())

found = {}
for precision in ("float32", "bf16"):
    rounded, _, _ = problem.fast(precision)
    fast = FastDenseNet(**problem.shape, precision=precision)
    rooms, _ = fast._room(2, 2, 2, 8, problem.x.device)
    fast._rooms[next(iter(fast._rooms))] = rooms, operations(precision)
    for call in ("first", "second"):  # which finds what the first one left
        mine, (fast_losses, fast_wrong), _ = fast(problem.params, {}, problem.masks, problem.x, problem.y)
        found[f"{precision} {call}"] = {
            "losses": float((fast_losses - losses).abs().max()),
            "wrong": int((fast_wrong - wrong).abs().max()),
            "gradient": apart(mine),
            "gradient_by_torch": apart(rounded),
        }

for precision in ("float32", "bf16"):
    wanted, losses, _, slopes = problem.readable_slopes()
    fast = FastDenseNet(**problem.shape, precision=precision)
    rooms, _ = fast._room(2, 2, 2, 8, problem.x.device)
    fast._rooms[next(iter(fast._rooms))] = rooms, operations(precision)
    mine, (fast_losses, _), (fast_slopes, _) = fast(
        problem.params, {}, problem.masks, *problem.own_images(), slopes=True
    )
    closed = problem.masks == 0
    found[f"slopes {precision}"] = {
        "losses": float((fast_losses - losses).abs().max()),
        "gradient": apart(mine, wanted),
        "open": float((fast_slopes - slopes)[~closed].norm() / slopes[~closed].norm()),
        "closed": float((fast_slopes - slopes)[closed].norm() / slopes[closed].norm()),
    }

# Of one mask, in the same room, with slopes and without: the same gradient, bfloat16 or not.
rooms, _ = fast._room(2, 1, 2, 8, problem.x.device)
fast._rooms[list(fast._rooms)[-1]] = rooms, operations("bf16")
one, x, y = problem.masks[:, :1], problem.x, problem.y
for call in ("first", "second"):
    plain, _, _ = fast(problem.params, {}, one, x, y)
    sloped, _, _ = fast(problem.params, {}, one, x[:, None], y[:, None], slopes=True)
    found[f"plain and sloped {call}"] = apart(sloped, plain)

fast = FastDenseNet(**problem.shape, precision="float32")
rooms, _ = fast._room(2, 2, 2, 8, problem.x.device)
fast._rooms[next(iter(fast._rooms))] = rooms, operations("float32")
_, (losses, _), _ = fast(problem.params, {}, torch.ones_like(problem.masks), problem.x, problem.y)
for name in ("stem.weight", "blocks.1.0.conv.weight", "blocks.2.0.norm.weight", "transitions.0.norm.bias"):
    params = {key: p.clone() for key, p in problem.params.items()}
    params[name].flatten(1)[0, 0] = torch.inf
    # All gates open: weights behind a closed one are not even read.
    grads, (spoilt, _), _ = fast(params, {}, torch.ones_like(problem.masks), problem.x, problem.y)
    found[f"diverged {name}"] = {
        "shows": not bool(spoilt[0].isfinite().any()),
        "apart": float((spoilt[1] - losses[1]).abs().max()),
        "finite": all(bool(g[1].isfinite().all()) for g in grads.values()),
    }
print(json.dumps(found))
"""


@pytest.mark.long
@pytest.mark.parametrize("rows", [2, 4])
def test_interpreted_kernels_compute_what_torch_computes(rows):
    np = pytest.importorskip("numpy")
    if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("Triton's interpreter reads numbers in a way that NumPy 2.4 has ended")
    found = finished("-c", INTERPRETED, str(Path(__file__).parent), str(rows), TRITON_INTERPRET="1")
    diverged = {name: row for name, row in found.items() if name.startswith("diverged")}
    assert len(diverged) == 4
    for name, row in diverged.items():  # the run itself, and not the one beside it
        assert row["shows"], name
        assert row["apart"] < 1e-5, name
        assert row["finite"], name
    for name, value in found["slopes float32"].items():
        assert value < 1e-5, name
    for name, value in found["slopes bf16"].items():
        assert value < 0.1, name
    for call in ("first", "second"):
        assert found[f"plain and sloped {call}"] < 1e-5
    for call in ("first", "second"):
        assert found[f"float32 {call}"]["losses"] < 1e-5
        assert found[f"float32 {call}"]["gradient"] < 1e-5
        assert found[f"float32 {call}"]["wrong"] == 0
        assert found[f"bf16 {call}"]["losses"] < 0.05
        assert found[f"bf16 {call}"]["gradient"] < 1.5 * found[f"bf16 {call}"]["gradient_by_torch"] < 0.5


@pytest.mark.long
def test_kernels_compile_for_an_h200_and_fit():
    made = finished(str(ROOT / "benchmarks" / "densenet_compile.py"))
    assert not made["failed"]
    assert not made["too_large"]
    names = {name.split()[1] for name in made["kernels"]}
    assert names == {"begin", "enter", "layer", "pool", "source", "finish", "weights", "settle"}
    assert {name.split()[-2] for name in made["kernels"] if " settle " in name} == {"[False]", "[True]"}  # slopes
    assert not [name for name, used in made["kernels"].items() if used["spilt_bytes"]]


def test_what_is_measured_is_what_was_chosen(monkeypatch):
    """Each choice of the benchmark's grid is asked for by the launches that are timed with it."""
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import densenet
    import densenet_compile
    from espalier.models.densenet_fast import FastDenseNet

    monkeypatch.setattr(jit.JITFunction, "run", lambda *_, **__: None)
    asked = []
    fast = FastDenseNet(40)
    rooms, _ = fast._room(1, 2, 1, 32, torch.device("cpu"))
    do = densenet_compile.operations("bf16", lambda *at: asked.append(at))
    fast._rooms[next(iter(fast._rooms))] = rooms, do
    params, masks = {"flat": torch.zeros(1, fast.size)}, torch.ones(1, 2, fast.d)
    fast(params, {}, masks, torch.zeros(1, 1, 3, 32, 32), torch.zeros(1, 1).long())
    for name in densenet_compile.GRID:
        for room in rooms:
            asked.clear()
            densenet_compile.launch(name, do, room)
            chosen = densenet.choices(Namespace(grid=True), name, room)
            assert ((name, room.block.size) in asked) == (chosen != [None])
            assert len(chosen) == len(set(chosen))


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def compiled():
    """All kernels that a GPU is asked for here, compiled side by side: one after the other takes minutes."""
    script, shallow = str(ROOT / "benchmarks" / "densenet_compile.py"), ("--depth", "10", "--precisions", "bf16")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda more: finished(script, *more, "--no-look"), ((), shallow)))


@pytest.fixture(scope="module")
def wanted():
    """A problem of full size with the readable version's gradient and losses, in float32 without tensor cores."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        sizes = {"images": 32, "size": 32, "depth": 40, "growth": 12, "classes": 10, "stem": 16}
        problem = Problem(dtype=torch.float32, device="cuda", **sizes)
        return problem, *problem.readable()[:2]
    finally:
        torch.backends.cudnn.allow_tf32 = before


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize(
    ("precision", "loss", "gradient"), [("float32", 1e-4, 1e-3), ("tf32", 2e-2, 5e-2), ("bf16", 5e-2, 0.3)]
)
def test_kernels_on_a_gpu(compiled, wanted, precision, loss, gradient):
    problem, theirs, losses = wanted
    mine, fast_losses, _ = problem.fast(precision)
    a, b = (torch.cat([grads[name].flatten() for name in theirs]) for grads in (mine, theirs))
    assert float((fast_losses - losses).abs().max()) < loss
    assert float((a - b).norm() / b.norm()) < gradient


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize(("precision", "apart"), [("float32", 1e-3), ("tf32", 5e-2), ("bf16", 0.3)])
def test_slopes_on_a_gpu(compiled, wanted, precision, apart):
    """One mask, its own images: as the recipe reads them."""
    problem = copy.copy(wanted[0])
    problem.masks = problem.masks[:, :1]
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        theirs, _, _, slopes = problem.readable_slopes()
    finally:
        torch.backends.cudnn.allow_tf32 = before
    mine, _, _, fast_slopes = problem.fast_slopes(precision)
    a, b = (torch.cat([grads[name].flatten() for name in theirs]) for grads in (mine, theirs))
    assert float((a - b).norm() / b.norm()) < apart
    for open_ in (problem.masks != 0, problem.masks == 0):
        assert float((fast_slopes - slopes)[open_].norm() / slopes[open_].norm()) < apart


@pytest.mark.cuda
@on_a_gpu
def test_a_recorded_update_is_the_update(compiled):
    """In a CUDA graph, replayed with other masks and images."""
    from espalier.models.densenet_fast import FastDenseNet

    problem = Problem(dtype=torch.float32, device="cuda", images=8, size=32, growth=12, stem=16)
    fast = FastDenseNet(**problem.shape, precision="bf16")
    packed = fast.pack(problem.params)
    masks, x = problem.masks.clone(), problem.x.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fast(packed, {}, masks, x, problem.y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads, (losses, _), _ = fast(packed, {}, masks, x, problem.y)
    masks.copy_(1 - problem.masks)
    masks[..., -4:] = 1
    x.copy_(problem.x.flip(1))
    graph.replay()
    again = FastDenseNet(**problem.shape, precision="bf16")
    theirs, (their_losses, _), _ = again(packed, {}, masks, x, problem.y)
    assert torch.allclose(losses, their_losses, rtol=1e-3)
    assert float((grads["flat"] - theirs["flat"]).norm() / theirs["flat"].norm()) < 1e-2
