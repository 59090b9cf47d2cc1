"""Latency as a cost: compact variants measured on this machine, and a model of their widths fitted to the times.

The time of a network is a sum: a constant, a term for each layer that grows with the product of its widths, and one for
each group of gates that grows with its width. Hardware works in tiles, so the widths of a layer count as whole tiles;
the size of a tile is the one that predicts best what was left out. No coefficient is negative, so that no gate makes a
network faster, and the expectation over theta is exact, see :mod:`espalier.cost.widths`.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import importlib
import io
import json
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from espalier import schema
from espalier.compact.apply import without_graphs
from espalier.compact.exported import exported, onnx_file, plain_outputs, quiet
from espalier.cost import Cost, Form
from espalier.files import write
from espalier.gates.costs import elements, form_of
from espalier.search.selection import least_open
from espalier.space import BadInput, Bits, Corrupt

if TYPE_CHECKING:
    from espalier.gates.gated import Gated

FORMAT = 5  # 1, 2: of the least times; 3: with page faults, without the smallest network; 4: of several ONNX graphs
_NUMBER = schema.number(0)
_KEPT = schema.record(
    {
        schema.CHECKSUM: schema.text(),
        "weights": schema.each(_NUMBER),
        **dict.fromkeys(("constant", "full", "residual", "worst"), _NUMBER),
        **dict.fromkeys(("tile", "variants"), schema.integer(1, 1 << 31)),
    }
)
TILES = (1, 4, 8, 16, 32)
SHARES = (1.0, 0.85, 0.7, 0.55, 0.42, 0.32, 0.24, 0.16)
VARIABLE = "ESPALIER_CACHE"
Run = Callable[[], object]
Runtime = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Run]


@dataclass(frozen=True)
class Latency:
    """What was measured of a model's variants. ``cost``: milliseconds by widths. ``residual``: how far a prediction is
    off in the middle, relative, for a variant that the fit has not seen. ``worst``: nine of ten are nearer than this.
    ``full``: milliseconds of the whole network. ``tile``: widths count in whole tiles of so many."""

    cost: Cost
    runtime: str
    device: str
    batch: int
    full: float
    residual: float
    worst: float
    tile: int
    variants: int
    _inputs: tuple[Any, ...] = field(repr=False, default=())
    _words: dict[str, Any] = field(repr=False, default_factory=dict)

    def measure(self, models: Mapping[str, nn.Module], rounds: int = 40) -> dict[str, float]:
        """Milliseconds of each model, measured in turns."""
        runs = {name: prepared(self.runtime, model, self._inputs, self._words) for name, model in models.items()}
        times = timed(list(runs.values()), rounds, seconds=20, wait=self.device != "cpu")
        return dict(zip(runs, times, strict=True))


def latency_of(gated: Gated, runtime: str = "torch", device: str | torch.device = "cpu", batch: int = 1) -> Latency:
    """Measure and fit, or read what an earlier call on this machine kept.

    runtime: a name in ``RUNTIMES``: "torch" or "onnxruntime". device: of torch. batch: how many examples at once.
    """
    device = str(device)
    if runtime not in RUNTIMES:
        raise BadInput(f"a runtime is one of {', '.join(RUNTIMES)}, not {runtime!r}")
    if runtime != "torch" and device != "cpu":
        raise BadInput(f"{runtime} is measured on the CPU, not on {device!r}")
    if any(not isinstance(group, Bits) for group in gated.space.groups):
        raise BadInput("latency is a function of widths; a space with choices has none")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise BadInput(f"batch is a number of examples, not {batch!r}")

    def repeated(value: Tensor) -> Tensor:
        batched = value.ndim and len(value) == gated.examples
        return (value[torch.arange(batch, device=value.device) % len(value)] if batched else value).to(device)

    args, kwargs = tree_map_only(Tensor, repeated, tuple(gated.example))
    key = _key(gated, runtime, device, batch, (args, kwargs))
    path = folder() / "latency" / f"{key}.json"
    kept = _kept(path)
    if kept is None:
        kept = _measured(gated, runtime, device, args, kwargs)
        write(path, schema.sealed(kept, indent=1))
    cost = Cost.product([Form((), 1.0)], d=gated.d, scale=max(kept["constant"], 1e-9))
    layers, widths = _columns(gated, kept["tile"])
    for weight, column in zip(kept["weights"], [*layers, *widths], strict=True):
        if weight > 0:
            cost = cost + column * weight
    label = f"latency {runtime} {device} {batch} {key[:12]}"
    cost = replace(cost, space=gated.space, label=label)
    numbers = {name: kept[name] for name in ("full", "residual", "worst", "tile", "variants")}
    return Latency(cost, runtime, device, batch, **numbers, _inputs=args, _words=kwargs)


def asked_by(kind: str) -> dict[str, Any]:
    """What a kind of cost that begins with "latency" asks for besides: a runtime, a batch, or both.

    >>> asked_by("latency"), asked_by("latency:onnxruntime"), asked_by("latency:onnxruntime:64")
    ({}, {'runtime': 'onnxruntime'}, {'runtime': 'onnxruntime', 'batch': 64})
    """
    asked: dict[str, Any] = {}
    for word in kind.split(":")[1:]:
        name = "batch" if word.isdigit() else "runtime"
        if name in asked or not word:
            raise BadInput(
                f"a latency is asked for as latency:onnxruntime:64, with a runtime and a batch, not {kind!r}"
            )
        asked[name] = int(word) if word.isdigit() else word
    return asked


def folder() -> Path:
    """Where measurements are kept: ESPALIER_CACHE, or the user's cache folder."""
    own = os.environ.get(VARIABLE)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(own) if own else home / "espalier"


# ---- measuring -------------------------------------------------------------------------------------------------------


def _in_torch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    model = model.to(device).eval()

    def run() -> None:
        with torch.no_grad():
            model(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _in_onnxruntime(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    try:
        return _opened(_traced, model, args, kwargs)
    except BadInput:
        raise
    except Exception:  # of every kind: an operation that it does not know, a tensor without elements
        return as_shipped(model, args, kwargs)


def as_shipped(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    """In onnxruntime, by the exporter by which networks ship."""
    return _opened(
        lambda *given: onnx_file(exported(plain_outputs(given[0]), *given[1:3]), given[3]), model, args, kwargs
    )


def _opened(write_file: Callable[..., bytes], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ModuleNotFoundError:
        raise BadInput("this needs onnxruntime: pip install 'espalier[onnx]'") from None
    names = [f"input_{i}" for i in range(len(args))] + list(kwargs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Threads that have nothing to do wait for more in a loop, also when their network is done: they would hold up the
    # next one, whose turn it is.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    file = write_file(_as_trained(model.cpu().eval()), args, kwargs, names)
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    taken = {one.name for one in session.get_inputs()}
    fed = {name: value.numpy() for name, value in zip(names, (*args, *kwargs.values())) if name in taken}
    return lambda: session.run(None, fed)


def _as_trained(model: nn.Module) -> nn.Module:
    """A model without parameters that are one number throughout, such as biases of 0: exporters leave those out, and a
    network before its training would be faster than afterwards."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for one in model.parameters():
            if one.numel() and one.is_floating_point() and bool((one == one.flatten()[0]).all()):
                one.add_(0.01 * torch.randn(one.shape, generator=generator))
    return model


def _traced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> bytes:
    """ONNX by torch's older exporter: what it gives is as fast, and is there much sooner than by the one by which
    networks ship."""
    data, log = io.BytesIO(), cast(Any, getattr(torch._C, "_jit_onnx_log", None))
    torch._C._jit_onnx_log = lambda *_: None  # by which it prints the graph that it cannot write, whatever is set
    try:
        with quiet(), redirect_stdout(io.StringIO()):
            torch.onnx.export(model, args, data, kwargs=kwargs or None, dynamo=False, input_names=names)  # type: ignore[arg-type]
    finally:
        torch._C._jit_onnx_log = log
    return data.getvalue()


# By name what makes a model ready to be timed: from a model and its inputs to a function that runs it once.
RUNTIMES: dict[str, Runtime] = {"torch": _in_torch, "onnxruntime": _in_onnxruntime}


def prepared(runtime: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    """A copy of a model made ready; the model itself stays where it is, and as it is."""
    return RUNTIMES[runtime](copy.deepcopy(model, without_graphs(model)), args, kwargs)


@contextmanager
def kept_memory() -> Iterator[None]:
    """Let this process keep the memory that it frees. By glibc's default a large tensor is returned to the system when
    it is freed, and every page of the next one is a fault: up to a third of a network's time, by turns, after what else
    the process did. A network is timed in a process that keeps its memory, as onnxruntime and jemalloc do."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    try:
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the top of the heap stays
        mallopt(-4, 0)  # M_MMAP_MAX: large tensors lie on the heap
        yield
    finally:
        mallopt(-1, 128 * 1024)  # glibc's own numbers
        mallopt(-4, 65536)


@kept_memory()
def timed(runs: Sequence[Run], rounds: int, seconds: float = 60.0, wait: bool = False) -> list[float]:
    """Milliseconds of each. In turns, in another order each round, so that a busy moment of the machine hits all alike,
    and can be told, see :func:`steadied`; short ones several times at once, so that the clock does not count. With one
    thread on a CPU its own time is taken; not where it waits for a device."""
    clock = time.thread_time if torch.get_num_threads() == 1 and not wait else time.perf_counter
    once = []
    for run in runs:
        run()
        began = clock()
        run()
        once.append(max(clock() - began, 1e-6))
    times = [max(1, min(50, round(1e-3 / each))) for each in once]
    order, turns, taken = list(range(len(runs))), list[int](), list[float]()
    shuffle = random.Random(0)
    end = time.perf_counter() + seconds
    for turn in range(rounds):
        shuffle.shuffle(order)
        for i in order:
            began = clock()
            for _ in range(times[i]):
                runs[i]()
            turns.append(i)
            taken.append(1e3 * (clock() - began) / times[i])
        if turn >= 5 and time.perf_counter() > end:
            break
    return [float(each) for each in steadied(np.array(turns), np.array(taken))]


def steadied(turns: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """The time of each run from times taken in turns on a machine that is slower at moments, as a core is whose other
    half works for somebody else: how slow a moment was is told by the runs around it, and is divided out.

    turns: which run it was, taken: how long it took, both in the order in which they were taken. Returns the median
    of each run's times, as they would be in the machine's quiet moments.
    """
    which = [turns == i for i in range(int(turns.max()) + 1)]
    found = np.array([taken[own].min() for own in which])
    near = min(4, (len(taken) - 1) // 2)
    for _ in range(4 if near else 0):
        ratios = np.lib.stride_tricks.sliding_window_view(np.pad(taken / found[turns], near, "reflect"), 2 * near + 1)
        slow = np.median(np.delete(ratios, near, 1), 1)
        clean = taken / np.maximum(slow / np.quantile(slow, 0.1), 1.0)
        found = np.array([np.median(clean[own]) for own in which])
    return found


# ---- the design ------------------------------------------------------------------------------------------------------


def designed(gated: Gated, seed: int = 0) -> list[Tensor]:
    """Masks to measure, the whole network first, then the smallest: all groups at several shares, with some spread
    between them, each group alone, and every group at a share of its own, as a search leaves them. Of each group any
    gates are open."""
    draw = random.Random(seed)
    masks = [torch.ones(gated.d), gated.canonical(least_open(gated.space, torch.zeros(gated.d)))]

    def mask(shares: Mapping[str, float]) -> Tensor:
        chosen = torch.zeros(gated.d)
        for name, where in gated.space.slices.items():
            size = where.stop - where.start
            chosen[draw.sample(range(where.start, where.stop), max(1, round(shares[name] * size)))] = 1.0
        return gated.canonical(chosen)

    names = list(gated.space.slices)
    pairs = [(share, spread) for share in SHARES for spread in (0.0, 0.25, 0.5, 0.8)]
    masks += [
        mask({n: min(1.0, share * math.exp(draw.uniform(-spread, spread))) for n in names}) for share, spread in pairs
    ]
    alone = names if len(names) <= 24 else draw.sample(names, 24)
    masks += [mask({n: draw.uniform(0.1, 0.5) if n == one else draw.uniform(0.7, 1.0) for n in names}) for one in alone]
    masks += [mask({n: draw.uniform(0.05, 1.0) for n in names}) for _ in range(12)]
    unique = {tuple(one.tolist()): one for one in masks}
    return list(unique.values())


def _columns(gated: Gated, tile: int) -> tuple[list[Cost], list[Cost]]:
    """What a time may be made of, each as a cost of about 1 for the whole network: of layers, and of widths."""
    numbers = dict.fromkeys(event.weight for event in gated.structure.trace.events)
    layers = [_product(gated, number, tile) for number in numbers]
    widths = [Cost.product([Form.run(own.start, own.stop)], d=gated.d) for own in gated.space.slices.values()]

    def scaled(costs: list[Cost]) -> list[Cost]:
        sizes = [float(cost(torch.ones(gated.d))) for cost in costs]
        return [replace(cost * (1 / size), space=None) for cost, size in zip(costs, sizes) if size > 0]

    return scaled(layers), scaled(widths)


def _product(gated: Gated, number: int, tile: int) -> Cost:
    """The elements of one weight, its widths counted in whole tiles; as they are where widths share gates in part."""
    structure, space = gated.structure, gated.space
    axes = [structure.entries(number, dim) for dim in range(structure.trace.tensors[number].tensor.ndim)]
    functions: dict[str | tuple[str, ...], Any] = {}
    scale = 1.0
    for axis in axes:
        opened = axis[axis >= 0]
        if not len(opened):
            scale *= len(axis)
            continue
        counts = np.bincount(opened, minlength=space.d)
        names = tuple(n for n, where in space.slices.items() if counts[where].any())
        inside = np.concatenate([counts[space.slices[name]] for name in names])
        if len(set(inside.tolist())) > 1 or any(set(names) & set(other) and names != other for other in functions):
            return elements(structure, number, ())
        widths = len(axis) - len(opened) + inside[0] * np.arange(len(inside) + 1)
        table = np.ceil(widths / tile) * tile
        functions[names] = functions[names] * table if names in functions else table
    if not functions:
        return Cost.product([form_of(axis) for axis in axes] or [Form((), 1.0)], d=space.d, scale=scale)
    return Cost.of_widths(space, functions, scale=scale)


# ---- the fit ---------------------------------------------------------------------------------------------------------


def _measured(gated: Gated, runtime: str, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    masks = designed(gated)
    runs = [prepared(runtime, gated.compact(mask), args, kwargs) for mask in masks]
    times = np.array(timed(runs, rounds=30, wait=device != "cpu"))
    del runs
    best = min((_fit(gated, tile, masks, times) for tile in TILES), key=lambda fit: float(fit["residual"]))
    return {"format": FORMAT, "full": float(times[0]), "variants": len(masks), **best}


def _fit(gated: Gated, tile: int, masks: Sequence[Tensor], times: np.ndarray) -> dict[str, Any]:
    """Coefficients by least squares of relative errors, none negative; residuals by leaving a fifth out in turn."""
    layers, widths = _columns(gated, tile)
    together = torch.stack(list(masks)).double()
    design = np.stack([np.ones(len(masks)), *(cost(together).numpy() for cost in (*layers, *widths))], 1)
    # few coefficients for all layers and all groups, to lean on
    sums = np.repeat(np.eye(3), [1, len(layers), len(widths)], 0)

    def solve(rows: np.ndarray) -> np.ndarray:
        counts = np.where(rows == 0, 30.0, 1.0)  # shares are of the whole network, so its time is met
        scaled = design[rows] / times[rows, None] * counts[:, None]
        common = sums @ nonnegative(scaled @ sums, counts)
        lean = 0.3 * math.sqrt(len(rows) / design.shape[1])
        ties = lean * np.eye(design.shape[1]) / times.max()
        return nonnegative(np.concatenate([scaled, ties]), np.concatenate([counts, ties @ common]))

    everything = np.arange(len(masks))
    errors = np.zeros(len(masks))
    for part in range(5):
        left = everything[everything % 5 == part]
        weights = solve(everything[everything % 5 != part])
        errors[left] = np.abs(design[left] @ weights / times[left] - 1)
    constant, *weights_ = solve(everything).tolist()
    middle, worst = float(np.median(errors)), float(np.quantile(errors, 0.9))
    return {"tile": tile, "constant": constant, "weights": weights_, "residual": middle, "worst": worst}


def nonnegative(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 that makes ``|a x - b|`` least, by the active set of Lawson and Hanson.

    >>> nonnegative(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([2.0, -1.0])).tolist()
    [2.0, 0.0]
    """
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):
        slope = a.T @ (b - a @ x)
        slope[free] = -np.inf
        if free.all() or slope.max() <= 1e-10 * max(1.0, float(np.abs(a.T @ b).max())):
            break
        free[slope.argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                x = trial
                break
            step = float((x[below] / np.maximum(x[below] - trial[below], 1e-300)).min())
            x = np.maximum(x + step * (trial - x), 0.0)
            free &= x > 1e-14
            if not free.any():
                break
    return x


# ---- keeping ---------------------------------------------------------------------------------------------------------


def _key(gated: Gated, runtime: str, device: str, batch: int, inputs: Any) -> str:
    """Of the network's shapes, what it is fed, the machine and the versions."""
    shapes = [(name, list(p.shape), str(p.dtype)) for name, p in gated.model.named_parameters()]
    given = [list(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    cpu = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((line for line in lines if line.startswith("model name")), "")
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    version = str(torch.__version__)
    if runtime == "onnxruntime":
        version += f" {importlib.import_module('onnxruntime').__version__}"
    words = [FORMAT, str(gated.model), gated.space.to_json(), shapes, given, runtime, device, batch, version]
    words += [platform.machine(), platform.node(), cpu, gpu, torch.get_num_threads()]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def _kept(path: Path) -> dict[str, Any] | None:
    """What was kept, None where there is nothing that can be read: it is then measured again."""
    try:
        return schema.read(path, _KEPT, newest=FORMAT)  # type: ignore[no-any-return]
    except (OSError, Corrupt):
        return None
