"""A small language model at half and a quarter of its parameters: ours, smaller ones from scratch, Torch-Pruning.

    python benchmarks/language.py --out results/language/gpt.jsonl --device cuda [--updates 4000] [--seeds 0,1,2]
    python benchmarks/language.py --out results/language/gpt.jsonl --into docs/evidence.md
    python benchmarks/language.py --out TUNING.jsonl --tune --methods ours --recipe '{"begin": 0.3, "ramp": 0.2}'

The text ships with Python: the documentation strings of its standard library, a tenth of the files held out. Tokens are
bytes. Every method makes as many updates of as many windows, with AdamW, a short warm-up and a straight line to 0.

ours: heads and units of the feed-forward parts are gates. ours-width: so is the width of the model.
uniform: all widths scaled alike, heads in the same proportion. pruned: Torch-Pruning after half of the run, by group
Taylor importance, then trained on; it cuts heads and units alone ("inner"), or the width of the model, too.
finetuned, cut-finetuned: what ``--fine`` updates more make of the whole model once it is trained ("dense"): ours with
the recipe "finetune", and Torch-Pruning, which cuts at once and trains on; both from the same weights, at one rate.

Perplexity is that of one byte of held-out text; with ``--tune`` of another tenth of the files, which then is not
trained on, and nothing reads the held-out text. ``--recipe`` changes fields of the default one for ours, ``--kinds``
its gates. A line for each run; lines that are there are not made again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import hashlib
import json
import math
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier.study import revision
from espalier.train import PRESETS
from evidence_table import mean
from run_lines import Lines, arguments
from wide_gates import FORMS, judged

MARKS = ("<!-- generated: language -->", "<!-- end of generated: language -->")
TUNED = ("<!-- generated: language tuning -->", "<!-- end of generated: language tuning -->")
VOCABULARY = 256
KINDS = "units,heads"
# What lines stand for that were written before a setting was there; the first are settings of ours alone.
OURS: dict[str, Any] = {"recipe": {}, "kinds": "units,heads,blocks", "size": None}
FINE: dict[str, Any] = {"fine": None, "fine_lr": None}  # settings of what begins with the whole model, trained
OLDER: dict[str, Any] = OURS | FINE | {"tune": False, "window": 128, "head": 32, "deviation": 0.02}


class Attention(nn.Module):
    """Of heads of one size; how many there are, its weights say."""

    def __init__(self, width: int, heads: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.q, self.k, self.v = (nn.Linear(width, size * heads) for _ in range(3))
        self.out = nn.Linear(size * heads, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self, width: int, heads: int, size: int, units: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, size)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, units), nn.Linear(units, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    def __init__(
        self, width: int, heads: int, size: int, units: int, blocks: int, window: int, deviation: float
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(window, width)
        self.blocks = nn.ModuleList([Block(width, heads, size, units) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@functools.cache
def documentation(part: range) -> bytes:
    """The documentation strings of the standard library, of the files whose hashes begin with a byte of this range."""
    parts: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in file.parts or "dist-packages" in file.parts:
            continue
        if hashlib.sha256(file.name.encode()).digest()[0] not in part:
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                parts[ast.get_docstring(node) or ""] = None
    return "\n\n".join(part for part in parts if part).encode()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Windows:
    """Windows of a text from places drawn anew for every batch; an epoch is all updates of a run."""

    def __init__(self, text: Tensor, window: int, batch: int, updates: int, seed: int) -> None:
        self.text, self.window, self.batch, self.updates = text, window, batch, updates
        self.random = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.text) - self.window - 1, (self.batch, 1), generator=self.random)
        there = (starts + torch.arange(self.window + 1)).to(self.text.device)
        tokens = self.text[there].long()
        return tokens[:, :-1], tokens[:, 1:]

    def __len__(self) -> int:
        return self.updates

    def __iter__(self) -> Any:
        return (self.next() for _ in range(self.updates))


class Case:
    """One seed: its texts, whole network and budget."""

    def __init__(self, given: argparse.Namespace, seed: int) -> None:
        self.given, self.seed, self.device = given, seed, torch.device(given.device)
        self.text, self.held_out = (
            torch.frombuffer(bytearray(documentation(part)), dtype=torch.uint8).to(self.device)
            for part in ((range(52, 256), range(26, 52)) if given.tune else (range(26, 256), range(26)))
        )

    @property
    def sha256(self) -> str:
        """The beginning of that of the text."""
        return hashlib.sha256(self.text.cpu().numpy().tobytes()).hexdigest()[:16]

    def network(self, scale: float = 1.0) -> GPT:
        given = self.given
        torch.manual_seed(self.seed)
        heads, units = max(round(given.heads * scale), 1), max(round(4 * given.width * scale), 1)
        return GPT(round(given.width * scale), heads, given.head, units, given.blocks, given.window, given.deviation)

    def windows(self) -> Windows:
        return Windows(self.text, self.given.window, self.given.batch, self.given.updates, self.seed)

    def more_windows(self) -> Windows:
        """Of the updates once the whole model is trained: the same for every method and size."""
        return Windows(self.text, self.given.window, self.given.batch, self.given.fine, self.seed + 1_000_003)

    @functools.cached_property
    def trained(self) -> GPT:
        """The whole model after all updates; a process trains it once."""
        model, updates = self.network().to(self.device), self.given.updates
        self.train(model, self.windows(), self.optimizer(model.parameters(), updates), updates)
        return model

    def optimizer(self, weights: Any, updates: int, done: int = 0, lr: float | None = None) -> torch.optim.Optimizer:
        """AdamW whose rate follows the schedule by itself: from ``done`` of so many updates on."""
        lr = self.given.lr if lr is None else lr
        optimizer = torch.optim.AdamW(weights, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
        warm = max(updates // 20, 1)

        def follow(*_: Any) -> None:
            nonlocal done
            rate = min((done + 1) / warm, (updates - done) / max(updates - warm, 1))
            for group in optimizer.param_groups:
                group["lr"] = lr * max(rate, 0.0)
            done += 1

        optimizer.register_step_pre_hook(follow)
        return optimizer

    def autocast(self) -> Any:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def train(self, model: nn.Module, windows: Windows, optimizer: torch.optim.Optimizer, updates: int) -> None:
        model.train()
        for _ in range(updates):
            tokens, following = windows.next()
            with self.autocast():
                loss = loss_of(model(tokens), following)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    @torch.no_grad()
    def perplexity(self, model: nn.Module) -> float:
        model.eval()
        window = self.given.window
        count = (len(self.held_out) - 1) // window
        tokens = self.held_out[: count * window].long().view(count, window)
        following = self.held_out[1 : count * window + 1].long().view(count, window)
        total = 0.0
        for x, y in zip(tokens.split(128), following.split(128)):
            total += float(loss_of(model(x), y)) * len(x)
        return math.exp(total / count)


def shaped(case: Case, model: GPT, target: float, windows: Windows, preset: str, width: bool, lr: float) -> nn.Module:
    """What ``fit`` makes of a model, with all of these windows."""
    kinds = (*case.given.kinds.split(","), *(("width",) if width else ()))
    gated = espalier.attach(model, windows.next()[0][:2], kinds=kinds)
    with case.autocast(), judged(case.given.size):
        result = espalier.fit(
            gated, windows, loss=loss_of, epochs=1, cost="parameters", target=target, seed=case.seed, quiet=True,
            optimizer=lambda weights: case.optimizer(weights, len(windows), lr=lr),
            recipe=replace(PRESETS[preset], **case.given.recipe),
        )  # fmt: skip
    if result.updates != len(windows):
        raise RuntimeError(f"fit made {result.updates} updates, not {len(windows)}")
    return result.model


def ours(case: Case, target: float, *, width: bool) -> nn.Module:
    model = case.network().to(case.device)
    return shaped(case, model, target, case.windows(), "default", width, case.given.lr)


def finetuned(case: Case, target: float) -> nn.Module:
    model = copy.deepcopy(case.trained)
    return shaped(case, model, target, case.more_windows(), "finetune", False, case.given.fine_lr)


def uniform(case: Case, target: float) -> nn.Module:
    limit = target * parameters(case.network())
    scales = [step / case.given.width for step in range(1, case.given.width + 1)]
    scale = max(s for s in scales if parameters(case.network(s)) <= limit)
    model = case.network(scale).to(case.device)
    updates = case.given.updates
    case.train(model, case.windows(), case.optimizer(model.parameters(), updates), updates)
    return model


def dense(case: Case, target: float) -> nn.Module:
    return case.trained


def cut(case: Case, model: GPT, batches: list[tuple[Tensor, Tensor]], share: float, inner: bool) -> GPT:
    """A copy of which Torch-Pruning has taken this share of every width it cuts."""
    import torch_pruning as tp

    model = copy.deepcopy(model)
    for tokens, following in batches:
        loss_of(model(tokens), following).backward()
    attentions = [block.attention for block in model.blocks]
    stream = [module for block in model.blocks for module in (block.attention.out, block.down)]
    kept = [model.head, *([model.token, model.place, *stream] if inner else [])]
    heads = {part: part.out_features // one.size for one in attentions for part in (one.q, one.k, one.v)}
    pruner = tp.pruner.BasePruner(
        model, batches[0][0][:2], tp.importance.GroupTaylorImportance(), pruning_ratio=share, ignored_layers=kept,
        num_heads=heads, prune_num_heads=True, prune_head_dims=False, head_pruning_ratio=share,
    )  # fmt: skip
    pruner.step()
    model.zero_grad()
    return model


def cut_to(case: Case, model: GPT, target: float, windows: Windows, inner: bool) -> GPT:
    """The largest that Torch-Pruning leaves of a model within this share. Its gradients are of windows that are not
    counted in the budget."""
    batches = [windows.next() for _ in range(4)]
    limit, low, high = target * parameters(model), 0.0, 1.0
    small = None
    for _ in range(12):
        middle = (low + high) / 2
        try:
            tried = cut(case, model, batches, middle, inner)
            fits = parameters(tried) <= limit
        except Exception:  # nothing is left of a layer
            fits, tried = True, None
        small, low, high = (tried or small, low, middle) if fits else (small, middle, high)
    if small is None:
        raise RuntimeError(f"Torch-Pruning leaves more than {target:g} of the parameters")
    return small


def pruned(case: Case, target: float, *, inner: bool) -> nn.Module:
    model, windows, updates = case.network().to(case.device), case.windows(), case.given.updates
    half = updates // 2
    case.train(model, windows, case.optimizer(model.parameters(), updates), half)
    small = cut_to(case, model, target, windows, inner)
    case.train(small, windows, case.optimizer(small.parameters(), updates, half), updates - half)
    return small


def cut_finetuned(case: Case, target: float) -> nn.Module:
    windows = case.more_windows()
    small = cut_to(case, case.trained, target, windows, inner=True)
    case.train(small, windows, case.optimizer(small.parameters(), len(windows), lr=case.given.fine_lr), len(windows))
    return small


METHODS: dict[str, Callable[[Case, float], nn.Module]] = {
    "ours": functools.partial(ours, width=False),
    "ours-width": functools.partial(ours, width=True),
    "uniform": uniform,
    "pruned": functools.partial(pruned, inner=False),
    "pruned-inner": functools.partial(pruned, inner=True),
    "dense": dense,
    "finetuned": finetuned,
    "cut-finetuned": cut_finetuned,
}
SHAPED = ("ours", "ours-width", "finetuned")


def widths(model: nn.Module) -> list[list[int]]:
    """Heads and units of each block, none of one that is gone."""
    attentions = ((getattr(block, "attention", None), getattr(block, "up", None)) for block in model.blocks)
    return [
        [getattr(getattr(one, "q", None), "out_features", 0) // getattr(one, "size", 1), getattr(up, "out_features", 0)]
        for one, up in attentions
    ]


def label(line: dict[str, Any]) -> str:
    """The method, and in what its setting differs from the present one."""
    words = [line["method"]]
    if line["fine"]:
        words.append(f"{line['fine']:,} updates more at a rate of {line['fine_lr']:g}")
    if line["method"] in SHAPED:
        words += [f"{name} {value:g}" for name, value in line["recipe"].items()]
        words += [] if line["kinds"] == KINDS else [f"gates on {line['kinds'].replace(',', ', ')}"]
    return ", ".join(words)


def table(lines: list[dict[str, Any]]) -> str:
    """One for each budget, size of the network and text, which differs between versions of Python."""
    order, named = list(METHODS), ("updates", "batch", "lr", "width", "heads", "blocks", "window", "head", "sha256")
    whole = sorted(({**OLDER, **line} for line in lines), key=lambda line: order.index(line["method"]))
    kept: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in whole:
        kept.setdefault(tuple(line[name] for name in named), []).append(line)
    return "\n\n".join(map(table_of_one, kept.values()))


def table_of_one(lines: list[dict[str, Any]]) -> str:
    targets = sorted({line["target"] for line in lines if line["method"] != "dense"}, reverse=True)
    first = lines[0]
    text = f"{first['text']:,} bytes of text, {first['held_out']:,} " + ("for tuning" if first["tune"] else "held out")
    rows = [
        f"{first['updates']:,} updates of {first['batch']} windows of {first['window']} bytes; {text}; "
        f"{first['blocks']} blocks of width {first['width']} with {first['heads']} heads; {first['device']}; "
        "perplexity of a byte, and parameters of the whole in %.",
        "",
        "| method | " + " | ".join(f"{100 * target:g}%" for target in targets) + " |",
        "|---|" + "---|" * len(targets),
    ]
    for row in dict.fromkeys(map(label, lines)):
        cells = []
        for target in targets:
            own = [line for line in lines if label(line) == row and line["target"] in (target, 1.0)]
            share = mean([line["share"] for line in own]) if own else 0.0
            perplexity = mean([line["perplexity"] for line in own]) if own else 0.0
            cells.append(f"{perplexity:.3f} ({100 * share:.1f}%, n = {len(own)})" if own else "")
        rows.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tune", action="store_true", help="measure on a part of the training text")
    parser.add_argument("--recipe", type=json.loads, default={}, help="fields of the recipe of ours, as JSON")
    parser.add_argument("--kinds", default=KINDS, help="of gates of ours")
    parser.add_argument("--size", choices=FORMS, help="of gates on many channels of ours, see wide_gates.py")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--targets", default="0.5,0.25")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--fine", type=int, default=1000, help="updates of what begins with the trained model")
    parser.add_argument("--fine-lr", type=float, default=5e-4, help="the rate of these")
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head", type=int, default=32, help="the size of one")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--deviation", type=float, default=0.02, help="of the weights at the start")
    given = parser.parse_args()
    lines = Lines(given.out, OLDER)
    if given.into:
        lines.put(given.into, TUNED if given.tune else MARKS, table)
        return
    budget = {name: getattr(given, name) for name in ("updates", "batch", "lr", "width", "heads", "blocks", *OLDER)}
    for seed in map(int, given.seeds.split(",")):
        case = Case(given, seed)
        for method in given.methods.split(","):
            own = budget | ({} if method in SHAPED else OURS) | ({} if method.endswith("finetuned") else FINE)
            for target in [1.0] if method == "dense" else list(map(float, given.targets.split(","))):
                run = own | {"method": method, "target": target, "seed": seed, "sha256": case.sha256}
                if lines.hold(run):
                    continue
                if method.endswith("finetuned"):
                    case.trained  # noqa: B018  its seconds are not those of what follows
                began = time.perf_counter()
                model = METHODS[method](case, target)
                seconds = time.perf_counter() - began
                line = run | {
                    "perplexity": case.perplexity(model),
                    "share": parameters(model) / parameters(case.network()),
                    "widths": widths(model),
                    "seconds": round(seconds, 1),
                    "text": len(case.text),
                    "held_out": len(case.held_out),
                    "device": torch.cuda.get_device_name() if case.device.type == "cuda" else "CPU",
                    "torch": torch.__version__,
                    "commit": revision(),
                    "command": shlex.join(["python", "benchmarks/language.py", *sys.argv[1:]]),
                }
                lines.add(line)
                print(f"{method} {target:g} seed {seed}: perplexity {line['perplexity']:.3f}, "
                      f"{100 * line['share']:.1f}% of the parameters, {line['seconds']:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
