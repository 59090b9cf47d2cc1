"""nn.TransformerEncoder and ViT at a quarter of their parameters: ours beside smaller networks from scratch.

    python benchmarks/encoders.py                                     # digits, in the package
    python benchmarks/encoders.py --data fashion-mnist --epochs 8 --data-dir FOLDER
    python benchmarks/encoders.py --into docs/performance.md

An image is a sequence: of its rows for the encoder, of patches for ViT. Every method makes as many updates of as many
examples, with AdamW of one learning rate, a short warm-up and a straight line to 0. ours: heads, units of the
feed-forward parts and the width of the residual stream are gates. blocks: the same with ``round_to=8``. inner: without
the width. uniform: the widest of one share for all widths, heads as large as in the whole network. A line for each run,
with the error on test images and the width of the stream; lines that are there are not made again.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import espalier
from espalier.data import Dataset
from espalier.train import evaluate
from espalier.train.descent import Linear
from evidence_table import deviation, mean
from language import parameters
from run_lines import Lines, arguments

MARKS = ("<!-- generated: encoders -->", "<!-- end of generated: encoders -->")
WIDTH, HEADS, UNITS, LAYERS = 64, 4, 4, 4  # units of the feed-forward parts: so many times the width
BLOCK = 8  # channels that come and go together: the stream has eight blocks
PATCH = {8: 2, 28: 7}  # by the side of an image


class Rows(nn.Module):
    """An encoder of torch over the rows of an image, and the mean of what it gives."""

    def __init__(self, side: int, width: int, heads: int) -> None:
        super().__init__()
        self.enter, self.place = nn.Linear(side, width), nn.Parameter(0.02 * torch.randn(side, width))
        layer = nn.TransformerEncoderLayer(width, heads, UNITS * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.enter(images[:, 0]) + self.place).mean(1))
        return logits


class Patches(nn.Module):
    """The ViT of Transformers, of its configuration."""

    def __init__(self, side: int, width: int, heads: int) -> None:
        super().__init__()
        import transformers

        config = transformers.ViTConfig(
            image_size=side, patch_size=PATCH[side], num_channels=1, num_labels=10, hidden_size=width,
            num_attention_heads=heads, intermediate_size=UNITS * width, num_hidden_layers=LAYERS,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.inner = transformers.ViTForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images).logits
        return logits


NETWORKS: dict[str, Callable[[int, int, int], nn.Module]] = {"nn.TransformerEncoder": Rows, "ViT": Patches}


class Case:
    """One network and seed: its data and budget."""

    def __init__(self, given: argparse.Namespace, data: Dataset, network: str, seed: int) -> None:
        self.given, self.data, self.seed, self.make = given, data, seed, NETWORKS[network]
        self.train, self.side = tuple(part[: given.images] for part in data.train), data.train_inputs.shape[-1]
        self.limit = given.target * parameters(self.network())

    def network(self, width: int = WIDTH) -> nn.Module:
        torch.manual_seed(self.seed)
        return self.make(self.side, width, width * HEADS // WIDTH)

    def optimizer(self, weights: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(weights, lr=self.given.lr, weight_decay=self.given.weight_decay)

    def plain(self, model: nn.Module) -> nn.Module:
        """Trained as it is."""
        (x, y), batch = self.train, self.given.batch
        updates = self.given.epochs * math.ceil(len(x) / batch)
        optimizer, shuffle = self.optimizer(model.parameters()), torch.Generator().manual_seed(self.seed)
        rate = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: float(Linear().factor(torch.tensor(done), updates))
        )
        model.train()
        for _ in range(self.given.epochs):
            for index in torch.randperm(len(x), generator=shuffle).split(batch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
                rate.step()
        return model

    def shaped(self, *kinds: str, round_to: int | None = None) -> nn.Module:
        result = espalier.fit(
            self.network(), self.train, kinds=kinds, cost="parameters", target=self.given.target, quiet=True,
            epochs=self.given.epochs, batch_size=self.given.batch, seed=self.seed, device="cpu",
            optimizer=self.optimizer, schedule="linear", round_to=round_to,
        )  # fmt: skip
        return result.model


def whole(case: Case) -> nn.Module:
    return case.plain(case.network())


def ours(case: Case) -> nn.Module:
    return case.shaped("units", "heads", "width")


def inner(case: Case) -> nn.Module:
    return case.shaped("units", "heads")


def blocks(case: Case) -> nn.Module:
    return case.shaped("units", "heads", "width", round_to=BLOCK)


def uniform(case: Case) -> nn.Module:
    sizes = [width for width in range(WIDTH // HEADS, WIDTH) if width % max(width * HEADS // WIDTH, 1) == 0]
    return case.plain(case.network(max(w for w in sizes if parameters(case.network(w)) <= case.limit)))


METHODS = {"ours": ours, "blocks": blocks, "inner": inner, "uniform": uniform, "whole": whole}


def table(lines: list[dict[str, Any]]) -> str:
    rows = ["| | " + " | ".join(METHODS) + " |", "|---|" + "---|" * len(METHODS)]
    keys = ("network", "data", "epochs", "lr")
    for setting in dict.fromkeys(tuple(line[key] for key in keys) for line in lines):
        cells = []
        for method in METHODS:
            wanted = dict(zip(keys, setting)) | {"method": method}
            own = [line for line in lines if wanted.items() <= line.items()]
            errors = [100 * line["error"] for line in own]
            share = mean([line["share"] for line in own]) if own else 0.0
            spread = f" ± {deviation(errors):.2f}" if len(own) > 1 else ""
            cells.append(f"{mean(errors):.2f}{spread} ({share:.1%}, n = {len(own)})" if own else "")
        network, data, epochs, lr = setting
        rows.append(f"| {network}, {data}, {epochs} epochs, lr {lr:g} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = arguments(__doc__, Path("results/ship/encoders.jsonl"))
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--images", type=int, default=10_000, help="of the training set, at most")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--target", type=float, default=0.25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3, help="of AdamW; what fit itself takes for such networks")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    given = parser.parse_args()
    lines = Lines(given.out)
    if given.into:
        lines.put(given.into, MARKS, table)
        return
    torch.set_num_threads(1)
    data = espalier.data.load(given.data, given.data_dir).as_floats()
    words = ("data", "images", "target", "epochs", "batch", "lr", "weight_decay")
    budget = {name: getattr(given, name) for name in words}
    for network in given.networks:
        for seed in given.seeds:
            case = Case(given, data, network, seed)
            for method in given.methods:
                run = budget | {"network": network, "method": method, "seed": seed}
                if lines.hold(run):
                    continue
                began = time.process_time()
                model = METHODS[method](case)
                seconds = time.process_time() - began
                score = evaluate(model, data.test, loss=F.cross_entropy)
                share = parameters(model) / parameters(case.network())
                stream = next(m.normalized_shape[0] for m in model.modules() if isinstance(m, nn.LayerNorm))
                measured = {"error": score.error, "share": share, "stream": stream, "seconds": round(seconds, 1)}
                lines.add(run | measured | {"torch": torch.__version__})
                print(
                    f"{network} {method} seed {seed}: {score.error:.2%}, {share:.1%}, stream {stream}, {seconds:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
