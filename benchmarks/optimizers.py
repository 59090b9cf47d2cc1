"""Which optimiser trains the weights well when none is given: small tasks of many kinds, on held-out data.

    python benchmarks/optimizers.py --out results/recipe/optimizers.jsonl [--tasks diabetes,...] [--seeds 2]
    python benchmarks/optimizers.py --out results/recipe/optimizers.jsonl --into docs/recipe.md

A line for each task, optimiser and seed; lines that are there are not made again. A seed draws the initial weights and
which quarter of the examples is held out. ``score`` is the error of classes, else the held-out loss over that of the
best constant guess: 1 is a network that has learned nothing. A run that diverges has no score.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F

import espalier
from espalier.report.tables import put_between
from espalier.train import PRESETS
from espalier.train.batched import SGD, AdamW
from evidence_table import mean

MARKS = ("<!-- generated: optimizers -->", "<!-- end of generated: optimizers -->")
UPDATES, BATCH, TARGET = 400, 32, 0.4
RECIPE = PRESETS["default"]
OPTIMIZERS: dict[str, Any] = {
    "SGD 0.1": SGD(RECIPE.weights_learning_rate, RECIPE.momentum, RECIPE.weight_decay, nesterov=True),
    "SGD 0.01": SGD(0.01, RECIPE.momentum, RECIPE.weight_decay, nesterov=True),
    "AdamW 0.001": AdamW(1e-3),
    "AdamW 0.003": AdamW(3e-3),
    "AdamW 0.01": AdamW(1e-2),
}
Task = tuple[Tensor, Tensor, Callable[[], nn.Module], Callable[[Tensor, Tensor], Tensor]]


def mlp(inputs: int, outputs: int, width: int = 64) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(width, outputs))

    return build


def columns(table: Any) -> Tensor:
    """A table's columns with mean 0 and deviation 1."""
    x = torch.as_tensor(table, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-6)


class Read(nn.Module):
    """The last state of a recurrent layer, and a linear one on it."""

    def __init__(self, layer: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, causal: bool) -> Tensor:
        y = self.first(x)
        parts = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(*parts, is_causal=causal).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """tokens: of a vocabulary, and each next one is told; else rows of numbers, of which one thing is told."""

    def __init__(
        self, inputs: int, outputs: int, length: int, tokens: bool = False, width: int = 32, blocks: int = 2
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.embed = nn.Embedding(inputs, width) if tokens else nn.Linear(inputs, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks, self.norm = nn.ModuleList([Block(width) for _ in range(blocks)]), nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        for block in self.blocks:
            x = block(x, self.tokens)
        x = self.norm(x)
        return self.head(x if self.tokens else x.mean(1))


def tokens_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


# ---- tasks ---------------------------------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor]:
    """Training examples alone."""
    data = espalier.data.load("digits").as_floats()
    return data.train[0].reshape(-1, 1, 8, 8), data.train[1]


def digits_mlp() -> Task:
    x, y = digits()
    return x.flatten(1), y, mlp(64, 10), F.cross_entropy


def digits_cnn() -> Task:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(32, 10),
        )  # fmt: skip

    return *digits(), build, F.cross_entropy


def cancer() -> Task:
    """Two classes by two scores."""
    table = datasets.load_breast_cancer()
    return columns(table.data), torch.as_tensor(table.target), mlp(30, 2), F.cross_entropy


def cancer_logit() -> Task:
    """The same by one logit."""
    x, y, _, _ = cancer()
    return x, y.float().unsqueeze(1), mlp(30, 1), F.binary_cross_entropy_with_logits


def labels() -> Task:
    x, y = datasets.make_multilabel_classification(
        n_samples=1500, n_features=30, n_classes=6, n_labels=3, random_state=0
    )
    return columns(x), torch.as_tensor(y, dtype=torch.float32), mlp(30, 6), F.binary_cross_entropy_with_logits


def diabetes() -> Task:
    table = datasets.load_diabetes()
    return columns(table.data), columns(table.target[:, None]), mlp(10, 1), F.mse_loss


def diabetes_raw() -> Task:
    """Targets as they are: from 25 to 346."""
    x, _, build, loss = diabetes()
    return x, torch.as_tensor(datasets.load_diabetes().target, dtype=torch.float32).unsqueeze(1), build, loss


def friedman() -> Task:
    x, y = datasets.make_friedman1(n_samples=1500, n_features=20, noise=1.0, random_state=0)
    return columns(x), columns(y[:, None]), mlp(20, 1), F.mse_loss


def friedman_raw() -> Task:
    """Targets as they are: about 14 with a deviation of 5."""
    x, y = datasets.make_friedman1(n_samples=1500, n_features=20, noise=1.0, random_state=0)
    return columns(x), torch.as_tensor(y, dtype=torch.float32).unsqueeze(1), mlp(20, 1), F.mse_loss


def sums() -> Task:
    """Sums of 40 features, three at once, by the absolute error."""
    x, y = datasets.make_regression(
        n_samples=1500, n_features=40, n_informative=10, n_targets=3, noise=20.0, random_state=0
    )
    return columns(x), columns(y), mlp(40, 3), F.l1_loss


def autoencoder() -> Task:
    x = digits()[0].flatten(1)
    return x, x.clone(), mlp(64, 64), F.mse_loss


def lstm() -> Task:
    """Digits row by row."""
    x, y = digits()
    return x.flatten(0, 1), y, lambda: Read(nn.LSTM(8, 48, batch_first=True), 48, 10), F.cross_entropy


def gru() -> Task:
    """The sum of the two numbers of a sequence that are marked."""
    draw = torch.Generator().manual_seed(0)
    numbers, marks = torch.rand(1500, 10, generator=draw), torch.zeros(1500, 10)
    marks.scatter_(1, torch.rand(1500, 10, generator=draw).topk(2, 1).indices, 1.0)
    y = (numbers * marks).sum(1, keepdim=True)
    return torch.stack([numbers, marks], 2), y, lambda: Read(nn.GRU(2, 32, batch_first=True), 32, 1), F.mse_loss


def transformer() -> Task:
    """Digits as eight rows."""
    x, y = digits()
    return x.flatten(0, 1), y, lambda: Transformer(8, 10, 8), F.cross_entropy


def transformer_wide() -> Task:
    """The same in six times the width and four blocks."""
    x, y = digits()
    return x.flatten(0, 1), y, lambda: Transformer(8, 10, 8, width=192, blocks=4), F.cross_entropy


def language() -> Task:
    """The next of numbers that count in steps of one to three, modulo twenty."""
    draw = torch.Generator().manual_seed(0)
    start, step = torch.randint(0, 20, (1500, 1), generator=draw), torch.randint(1, 4, (1500, 1), generator=draw)
    ids = (start + step * torch.arange(13)) % 20
    return ids[:, :-1].clone(), ids[:, 1:].clone(), lambda: Transformer(20, 20, 12, tokens=True), tokens_loss


def segmentation() -> Task:
    """Which pixels belong to a bright disc in noise."""
    draw = torch.Generator().manual_seed(0)
    middle, radius = 4 + 8 * torch.rand(800, 2, 1, 1, generator=draw), 2 + 3 * torch.rand(800, 1, 1, generator=draw)
    rows, across = torch.arange(16.0).reshape(1, 16, 1), torch.arange(16.0).reshape(1, 1, 16)
    disc = ((rows - middle[:, 0]) ** 2 + (across - middle[:, 1]) ** 2 < radius**2).float().unsqueeze(1)

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for a, b in ((1, 16), (16, 16), (16, 16)):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(16, 1, 1))

    noisy = disc + torch.randn(disc.shape, generator=draw)
    return noisy, disc, build, F.binary_cross_entropy_with_logits


CLASSES = (digits_mlp, digits_cnn, cancer)  # the networks and losses that the evidence is of
OTHERS = (
    cancer_logit, labels, diabetes, diabetes_raw, friedman, friedman_raw, sums, autoencoder, lstm, gru, transformer,
    transformer_wide, language, segmentation,
)  # fmt: skip
TASKS: dict[str, Callable[[], Task]] = {task.__name__: task for task in (*CLASSES, *OTHERS)}


def run(task: str, optimizer: str, seed: int) -> dict[str, Any]:
    x, y, build, loss = TASKS[task]()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, kept = order[: len(x) // 4], order[len(x) // 4 :]
    epochs = max(round(UPDATES / (len(kept) // BATCH)), 1)
    torch.manual_seed(seed)
    began, score, given = time.perf_counter(), None, OPTIMIZERS.get(optimizer)
    try:
        result = espalier.fit(
            build(), (x[kept], y[kept]), loss=loss, epochs=epochs, batch_size=BATCH, samples=1, target=TARGET,
            optimizer=given, schedule="linear", seed=seed, validation=(x[held], y[held]), quiet=True,
        )  # fmt: skip
        classes = result.validation_error
        score = classes if classes is not None else result.validation_loss / constant(loss, y[kept], y[held])
    except espalier.Diverged:
        pass
    return {
        "task": task, "optimizer": optimizer, "seed": seed, "score": score, "updates": epochs * (len(kept) // BATCH),
        "target": TARGET, "batch_size": BATCH, "seconds": round(time.perf_counter() - began, 2),
        "torch": torch.__version__,
    }  # fmt: skip


def constant(loss: Callable[[Tensor, Tensor], Tensor], known: Tensor, held: Tensor) -> float:
    """The loss of the best guess that reads no input: the mean, the median, or the share of yes."""
    guess = known.median(0).values if loss is F.l1_loss else known.mean(0)
    if loss is F.binary_cross_entropy_with_logits:
        guess = guess.mean((-2, -1), keepdim=True) if guess.ndim == 3 else guess
        guess = guess.logit()
    return float(loss(guess.expand_as(held), held))


def table(lines: list[dict[str, Any]]) -> str:
    names = [name for name in OPTIMIZERS if any(line["optimizer"] == name for line in lines)]
    text = ["| task | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for task in TASKS:
        cells = []
        for name in names:
            scores = [line["score"] for line in lines if (line["task"], line["optimizer"]) == (task, name)]
            lost = sum(score is None for score in scores)
            there = [score for score in scores if score is not None]
            shown = "" if not there else f"{mean(there):.3f}" if mean(there) < 100 else f"{mean(there):.1e}"
            cells.append(" ".join(part for part in (shown, f"({lost} diverged)" if lost else "") if part))
        if any(cells):
            text.append(f"| {task.replace('_', ' ')} | " + " | ".join(cells) + " |")
    seeds = len({line["seed"] for line in lines})
    about = (
        f"Held-out score, means of {seeds} seeds; {UPDATES} updates of {BATCH} examples, {TARGET:.0%} of the weights."
    )
    return f"{about}\n\n" + "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--into", type=Path, help="write the table between the marks of this page, and run nothing")
    asked = parser.parse_args()
    lines = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if asked.into is not None:
        put_between(asked.into, [(MARKS, table(lines))])
        return
    there = {(line["task"], line["optimizer"], line["seed"]) for line in lines}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(asked.seeds):
        for task in asked.tasks.split(","):
            for optimizer in asked.optimizers.split(","):
                if (task, optimizer, seed) not in there:
                    line = run(task, optimizer, seed)
                    with asked.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                    print(line["task"], line["optimizer"], line["score"], line["seconds"], flush=True)


if __name__ == "__main__":
    main()
