"""How fast what ships is: whole networks, ours by MACs and by latency, uniform ones of equal MACs, Torch-Pruning's.

    python benchmarks/ship.py --networks vgg16 densenet40 [--batches 1 64] [--threads 1 2] [--out results/ship]
    python benchmarks/ship.py --device cuda --shares 0.25 --minutes 7 --missing
    python benchmarks/ship.py --table docs/performance.md

Networks are small forms on a CPU, found in a short run on synthetic data: the widths a search leaves are what counts
here, not the error. "and uniform's latency": a share of the MACs and ``"uniform"`` as the limit on the latency in each
runtime of ``--limits``, for as many examples at once as ``--latency-batch``. Times are of one forward pass, in turns
(``espalier.gates.latency.timed``); with one thread on a CPU the thread's own time. In onnxruntime every network is
written by the exporter by which networks ship. ``compiled`` is measured with the first number of threads and the
largest batch alone, for compiling takes longer than all the rest; ``graph`` is a CUDA graph. With ``--device cuda``
batches are 1 and 256; runs are trained on the CPU, and what is measured is measured on the GPU, by one process at a
time: start one for each network. Writes a JSON file for each network; ``--minutes`` begins no further one after so
long, and ``--missing`` leaves out those that have a file, so that one call after another makes the list.
``--warm`` measures only the latencies that limit the runs, which are kept for the call that follows: together they may
take more than ten minutes. ``--table`` makes the table of the page from these files alone.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import espalier
from compact import alone, graphed, ungated
from espalier.files import write
from espalier.gates import latency
from espalier.gates.blocks import usual_width
from espalier.models import VGG, DenseNet, ResNet
from espalier.report.tables import put_between
from espalier.train.fingerprint import versions
from espalier.train.run_directory import hardware

ROUND_TO = "auto"
COMPILED = ("whole", "ours 25% MACs, round_to", "ours 25% MACs and uniform's latency", "uniform 25% MACs")
KINDS = dict.fromkeys(("vit", "bert", "gpt2"), ("units", "heads", "width"))


class Words(nn.Module):
    """An embedding, an LSTM of two layers, one linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(200, 64), nn.LSTM(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.table(ids))[0][:, -1])


class Transformer(nn.Module):
    """A model of Transformers, built of its configuration, that gives its logits."""

    def __init__(self, model: str, config: str, **sizes: Any) -> None:
        super().__init__()
        import transformers

        self.inner = getattr(transformers, model)(getattr(transformers, config)(**sizes))

    def forward(self, given: Tensor) -> Tensor:
        logits: Tensor = self.inner(given).logits
        return logits if logits.ndim == 2 else logits[:, -1, :10]


IMAGES, TOKENS = (3, 32, 32), (32,)
BERT = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 512, "num_hidden_layers": 4}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet20": (partial(ResNet, 20, streams=(32, 64, 128)), IMAGES),
    "resnet18": (
        partial(
            Transformer, "ResNetForImageClassification", "ResNetConfig", num_labels=10, layer_type="basic",
            embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2],
        ),
        (3, 64, 64),
    ),
    "resnet56": (partial(ResNet, 56), IMAGES),
    "vgg16": (partial(VGG, [w // 4 for w in (64, 64, 128, 128, 256, 256, 256, *(512,) * 6)]), IMAGES),
    "mobilenetv2": (
        partial(
            Transformer, "MobileNetV2ForImageClassification", "MobileNetV2Config", num_labels=10, depth_multiplier=0.5
        ),
        (3, 64, 64),
    ),
    "densenet40": (lambda: ungated(DenseNet(40, 12)), IMAGES),
    "vit": (
        partial(
            Transformer, "ViTForImageClassification", "ViTConfig", image_size=32, patch_size=4, num_labels=10, **BERT
        ),
        IMAGES,
    ),
    "bert": (
        partial(Transformer, "BertForSequenceClassification", "BertConfig", vocab_size=200, num_labels=10, **BERT),
        TOKENS,
    ),
    "gpt2": (
        partial(
            Transformer, "GPT2LMHeadModel", "GPT2Config", vocab_size=200, n_embd=128, n_layer=4, n_head=4,
            use_cache=False,
        ),
        TOKENS,
    ),
    "lstm": (Words, TOKENS),
}  # fmt: skip


def inputs(shape: tuple[int, ...], count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if len(shape) == 1:
        return torch.randint(0, 200, (count, *shape), generator=generator)
    return torch.randn(count, *shape, generator=generator)


def attached(name: str, model: nn.Module, **how: Any) -> Any:
    """Gates on a network; those of the DenseNet not tried out in numbers, which takes minutes there."""
    kinds = {"kinds": KINDS[name]} if name in KINDS else {}
    return espalier.attach(model, inputs(NETWORKS[name][1], 4), check=name != "densenet40", **kinds, **how)


def found(name: str, given: argparse.Namespace, shares: dict[str, Any], **how: Any) -> tuple[nn.Module, Any]:
    """What a short run leaves at these shares of the MACs, or of the latency of so many examples at once, or both."""
    factory, shape = NETWORKS[name]
    torch.manual_seed(0)
    x = inputs(shape, 8 * given.updates)
    y = (x.float().flatten(1)[:, :10]).argmax(1)
    gated = attached(name, factory(), **how)
    here = {"batch": given.latency_batch, "device": given.device}
    started = time.time()
    kinds = {kind: here if kind.startswith("latency") else {} for kind in shares}
    target = {gated.cost(kind, **kinds[kind]): share for kind, share in shares.items()}
    ready = time.time()
    result = espalier.fit(gated, (x, y), target=target, epochs=1, batch_size=8, samples=1, quiet=True, device="cpu")
    about: dict[str, Any] = {"seconds": round(time.time() - ready, 1), "seconds_measuring": round(ready - started, 1)}
    if result.latency is not None:
        about |= {"latency": result.latency, "latencies": list(result.latencies)}
    gated.detach()
    return result.model, about


def uniform(gated: Any, most: float) -> nn.Module:
    """The widest network of one share for all groups whose MACs are at most this share."""
    cost = gated.cost("macs")
    full = float(cost(torch.ones(gated.d)))

    def mask(share: float) -> Tensor:  # the first ones of each group
        chosen = torch.zeros(gated.d)
        for where in gated.space.slices.values():
            chosen[where.start : where.start + max(1, round(share * (where.stop - where.start)))] = 1.0
        return gated.canonical(chosen)

    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if float(cost(mask(middle))) <= most * full else (low, middle)
    return gated.compact(mask(low)).eval()


def pruned(name: str, share: float) -> nn.Module:
    """Torch-Pruning by magnitude, with widths in multiples, to this share of the MACs."""
    import torch_pruning as tp

    factory, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, example = factory().eval(), inputs(shape, 1)
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
    full = tp.utils.count_ops_and_params(model, example)[0]
    pruner = tp.pruner.MagnitudePruner(
        model, example, importance=tp.importance.MagnitudeImportance(p=2), iterative_steps=40, pruning_ratio=0.95,
        global_pruning=False, round_to=usual_width(model), ignored_layers=last,
    )  # fmt: skip
    for _ in range(40):
        before = copy.deepcopy(model)
        pruner.step()
        if tp.utils.count_ops_and_params(model, example)[0] < share * full:
            return before
    return model


def variants(name: str, given: argparse.Namespace) -> tuple[dict[str, nn.Module], dict[str, Any]]:
    torch.manual_seed(0)
    whole = NETWORKS[name][0]().eval()
    gated = attached(name, copy.deepcopy(whole))
    models: dict[str, nn.Module] = {"whole": whole}
    about: dict[str, Any] = {}

    def attempt(label: str, make: Callable[[], Any]) -> None:
        try:
            made = make()
            model, about[label] = made if isinstance(made, tuple) else (made, {})
            models[label] = model.eval()
        except Exception as error:  # a peer or a size that this network does not allow: named in the file
            about[label] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(f"{name}: {label}: {about[label]}", file=sys.stderr, flush=True)

    for share in given.shares:
        percent, limits = f"{share:.0%}", {"macs": share}
        attempt(f"ours {percent} MACs", partial(found, name, given, limits))
        attempt(f"ours {percent} MACs, round_to", partial(found, name, given, limits, round_to=ROUND_TO))
        limits = limits | {f"latency:{runtime}": "uniform" for runtime in given.limits}
        attempt(f"ours {percent} MACs and uniform's latency", partial(found, name, given, limits, round_to=ROUND_TO))
        attempt(f"uniform {percent} MACs", partial(uniform, gated, share))
        attempt(f"Torch-Pruning {percent} MACs", partial(pruned, name, share))
    if given.latency_share:
        label, limits = f"ours {given.latency_share:.0%} latency, round_to", {"latency": given.latency_share}
        attempt(label, partial(found, name, given, limits, round_to=ROUND_TO))
    return models, about


def macs(model: nn.Module, example: Tensor) -> int:
    """Multiplications with weights in one example, counted by hooks on the layers that hold them."""
    total = 0

    def add(layer: nn.Module, given: Any, output: Any) -> None:
        nonlocal total
        if isinstance(layer, nn.RNNBase):  # every matrix at every step
            total += given[0].shape[1] * sum(weight.numel() for weight in layer.parameters() if weight.ndim == 2)
            return
        channels = 1 if isinstance(layer, nn.modules.conv._ConvNd) else output.ndim - 1
        positions = output[0].numel() // max(output.shape[channels], 1)
        total += layer.weight.numel() * positions  # type: ignore[union-attr, operator]

    kinds = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase)
    layers = [m for m in model.modules() if isinstance(m, kinds) or type(m).__name__ == "Conv1D"]  # of Transformers
    hooks = [layer.register_forward_hook(add) for layer in layers]
    with torch.no_grad():
        model(example)
    for hook in hooks:
        hook.remove()
    return total


def compiled(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    torch._dynamo.reset()
    return latency._in_torch(torch.compile(model, dynamic=False), args, kwargs)  # type: ignore[arg-type]


def in_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    """One CUDA graph, and on a CPU the network as it is: it stands in where there is no GPU."""
    (x,) = args
    if x.device.type != "cuda":
        return latency._in_torch(model, args, kwargs)
    replay = graphed(model.to(x.device).eval(), x)
    return lambda: (replay(), torch.cuda.synchronize())


RUNTIMES = {**latency.RUNTIMES, "onnxruntime": latency.as_shipped, "compiled": compiled, "graph": in_graph}
DEFAULTS = {
    "cpu": {
        "batches": [1, 64],
        "threads": [1, 2],
        "runtimes": ["torch", "onnxruntime", "compiled"],
        "limits": ["torch", "onnxruntime"],
    },
    "cuda": {"batches": [1, 256], "threads": [1], "runtimes": ["torch", "graph"], "limits": ["torch"]},
}
SHOWN = {  # what the table shows of the files of a device
    "cpu": ("batch 64", ("torch, batch 64, threads 1", "onnxruntime, batch 64, threads 1")),
    "cuda": ("batch 256 on a GPU", ("torch, batch 256, threads 1", "graph, batch 256, threads 1")),
}


def measured(models: dict[str, nn.Module], example: Tensor, runtime: str, given: argparse.Namespace) -> dict[str, Any]:
    runs, times = {}, dict[str, Any]()
    for label, model in models.items():
        if runtime == "compiled" and label not in COMPILED:
            times[label] = "not measured"
            continue
        try:
            runs[label] = RUNTIMES[runtime](copy.deepcopy(model), (example,), {})
            runs[label]()
        except Exception as error:
            runs.pop(label, None)
            times[label] = f"{type(error).__name__}"
    if not runs:
        return times
    wait = example.device.type != "cpu"
    return times | dict(zip(runs, latency.timed(list(runs.values()), given.rounds, given.seconds, wait), strict=True))


def benchmark(name: str, given: argparse.Namespace) -> dict[str, Any]:
    shape = NETWORKS[name][1]
    models, about = variants(name, given)
    rows = []
    for label, model in models.items():
        sizes = {"parameters": sum(p.numel() for p in model.parameters()), "macs": macs(model, inputs(shape, 1))}
        rows.append({"variant": label, **sizes, **about.get(label, {}), "milliseconds": {}})
    for threads in given.threads:
        torch.set_num_threads(threads)
        for batch in given.batches:
            for runtime in given.runtimes:
                if runtime == "compiled" and (threads, batch) != (given.threads[0], max(given.batches)):
                    continue
                times = measured(models, inputs(shape, batch).to(given.device), runtime, given)
                for row in rows:
                    value = times[row["variant"]]
                    row["milliseconds"][f"{runtime}, batch {batch}, threads {threads}"] = (
                        value if isinstance(value, str) else round(value, 4)
                    )
                print(f"{name}: {runtime} at {batch} done", file=sys.stderr, flush=True)
    torch.set_num_threads(1)
    failed = {label: one for label, one in about.items() if "error" in one}
    where = machine("benchmarks/ship.py", given.device)
    return {"network": name, "updates": given.updates, "rows": rows, "not_made": failed, **where}


def marks(name: str, device: str) -> tuple[str, str]:
    """Of the generated part of a page, one for each kind of device."""
    part = name if device == "cpu" else f"{name}-{device}"
    return f"<!-- generated: {part} -->", f"<!-- end of generated: {part} -->"


def machine(program: str, device: str) -> dict[str, Any]:
    """What a result file says of where it was made, and how."""
    told: dict[str, Any] = {"command": shlex.join(["python", program, *sys.argv[1:]]), "versions": versions()}
    for package in ("onnxruntime", "transformers", "torch-pruning"):
        try:
            told["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            told["versions"][package] = "not there"
    return told | {"hardware": hardware(torch.device(device))}


COLUMNS = {
    "ours": "ours {} MACs",
    "ours, blocks": "ours {} MACs, round_to",
    "and uniform's latency": "ours {} MACs and uniform's latency",
    "uniform": "uniform {} MACs",
    "Torch-Pruning": "Torch-Pruning {} MACs",
}


def speed(told: dict[str, Any], variant: str, share: float, key: str) -> str:
    """How many times as fast as the whole network a variant is. A dash where there is none, or none so small."""
    whole, *rows = told["rows"]
    row = next((row for row in rows if row["variant"] == variant and row["macs"] < 1.2 * share * whole["macs"]), None)
    times = (whole["milliseconds"].get(key), row and row["milliseconds"].get(key))
    return f"{times[0] / times[1]:.2f}" if all(isinstance(time, float) for time in times) else "-"


def table(folder: Path, device: str) -> str:
    """Of every network how many times as fast as the whole one each variant of a share of its MACs is."""
    batch, keys = SHOWN[device]
    names = "; ".join(key.partition(",")[0] for key in keys)
    lines = [
        f"Times as fast as the whole network, at a share of its MACs and {batch}: {names}.\n",
        "| | MACs | " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * (2 + len(COLUMNS)),
    ]
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        for share in (0.5, 0.25):
            percent = f"{share:.0%}"
            cells = [
                "; ".join(speed(told, variant.format(percent), share, key) for key in keys)
                for variant in COLUMNS.values()
            ]
            if any(cell.strip("-; ") for cell in cells):
                lines.append(f"| {told['network']} | {percent} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--latency-batch", type=int, help="of which latency is searched against; the largest batch")
    parser.add_argument("--threads", type=int, nargs="+")
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES)
    parser.add_argument("--limits", nargs="+", choices=latency.RUNTIMES, help="runtimes whose latency is limited")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25], help="of the MACs")
    parser.add_argument("--latency-share", type=float, default=0.4, help="of the latency alone; 0: no such network")
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=45.0, help="for the rounds of one setting, at least six")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no further network is begun")
    parser.add_argument("--warm", action="store_true", help="only measure the latencies that runs are limited by")
    parser.add_argument("--missing", action="store_true", help="leave out networks that have a file")
    parser.add_argument("--out", type=Path, help="results/ship, or on a GPU results/ship-cuda")
    parser.add_argument("--table", type=Path, help="The page whose generated part is to be replaced.")
    given = parser.parse_args()
    device = given.device.partition(":")[0]
    given.out = given.out or Path("results/ship" if device == "cpu" else f"results/ship-{device}")
    if given.table is not None:
        put_between(given.table, [(marks("ship", device), table(given.out, device))])
        return
    for key, value in DEFAULTS[device].items():
        if getattr(given, key) is None:
            setattr(given, key, value)
    given.latency_batch = given.latency_batch or max(given.batches)
    torch.set_num_threads(1)
    if device == "cuda":
        latency.timed = alone()(latency.timed)
    started = time.time()
    for name in given.networks:
        if (given.missing and (given.out / f"{name}.json").exists()) or time.time() - started > 60 * given.minutes:
            print(f"{name}: left out", file=sys.stderr)
            continue
        if given.warm:
            gated = attached(name, NETWORKS[name][0](), round_to=ROUND_TO)
            for runtime in given.limits:
                one = gated.latency(runtime, given.device, given.latency_batch)
                print(f"{name}: {runtime}: {one.full:.2f} ms, {one.residual:.1%} off, {one.worst:.1%} for nine of ten")
            continue
        told = benchmark(name, given)
        write(given.out / f"{name}.json", json.dumps(told, indent=1) + "\n")
        print(json.dumps(told))


if __name__ == "__main__":
    main()
