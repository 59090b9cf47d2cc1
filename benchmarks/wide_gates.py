"""Gates on many channels, judged in three ways: networks that ``round_to`` shapes, at a small size.

    python benchmarks/wide_gates.py --network mlp --seeds 0,1,2,3,4,5,6,7,8,9
    python benchmarks/wide_gates.py --network conv --data-dir DIR [--seeds 0,1,2]
    python benchmarks/wide_gates.py --into docs/signal.md

mlp: digits, 64-64-64-64-10, 20 epochs; a fifth of the training images is held out. conv: Fashion-MNIST, three
convolutions of 32, 64 and 64 channels with BatchNorm, 3 epochs of 6,000 training images; the next 4,000 are held out.
No test image is read. The default recipe; only the size that theta is told of a gate differs:

slope: that of its slope, |sum_c g_c|. norm: the root of sum_c g_c^2. sum: sum_c |g_c|. single: gates on single units.
A line for each run; lines that are there are not made again.
"""

from __future__ import annotations

import itertools
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import espalier
from espalier.data import load
from espalier.gates.masking import Channels
from espalier.study import revision
from evidence_table import mean
from run_lines import Lines, arguments
from signals_table import BY_UNITS, half, over_all, read

MARKS = ("<!-- generated: wide gates -->", "<!-- end of generated: wide gates -->")
OUT = Path("results/signal/wide-gates.jsonl")
HEADS = Path("results/language/heads.jsonl")  # runs of language.py, with the size of a head beside
EXACT = sorted(Path("results/signal").glob("units-*.json"))  # of signals.py
FORMS: dict[str, Callable[[Tensor], Tensor]] = {  # of the slopes by the channels of gates (.., channels): their sizes
    "slope": lambda g: g.sum(-1).abs(),
    "norm": lambda g: g.square().sum(-1).sqrt(),
    "sum": lambda g: g.abs().sum(-1),
    "mean": lambda g: g.abs().mean(-1) * g.shape[-1] ** 0.5,
}
WORDS = {
    "slope": "`\\|sum_c g_c\\|`",
    "norm": "`sqrt(sum_c g_c^2)`",
    "sum": "`sum_c \\|g_c\\|`",
    "mean": "`sum_c \\|g_c\\| / sqrt(n)`, n channels",
    "single": "gates on single units",
}


@contextmanager
def judged(form: str | None) -> Iterator[None]:
    """Gates have sizes of this form, in place of ``Channels.sized``; None: as they have."""

    def sized(channels: Channels, slopes: Tensor, even: float = 0.0) -> tuple[Tensor, Tensor]:
        totals = slopes.new_empty((2, *slopes.shape[:-1], channels.d))
        for gates, where, _ in channels.by_width:
            own = slopes[..., where]
            totals[0][..., gates], totals[1][..., gates] = own.sum(-1), FORMS[form](own)
        return totals[0], totals[1]

    kept = Channels.sized
    if form is not None:
        Channels.sized = sized  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Channels.sized = kept  # type: ignore[method-assign]


def mlp() -> nn.Module:
    widths = (64, 64, 64, 64)
    layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain(*layers), nn.Linear(64, 10))


def conv() -> nn.Module:
    layers = [
        [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]
        for a, b in itertools.pairwise((1, 32, 64, 64))
    ]
    return nn.Sequential(*itertools.chain(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"make": mlp, "data": "digits", "train": 1077, "held_out": 270, "epochs": 20, "batch": 16},
    "conv": {"make": conv, "data": "fashion-mnist", "train": 6000, "held_out": 4000, "epochs": 3, "batch": 32},
}


def run(given: Any, form: str, target: float, seed: int) -> dict[str, Any]:
    about = NETWORKS[given.network]
    data = load(about["data"], given.data_dir, download=False).as_floats()
    x, y = data.train
    x = x.flatten(1) if given.network == "mlp" else x
    ends = (about["train"], about["train"] + about["held_out"])
    torch.manual_seed(seed)
    model = about["make"]()
    gated = espalier.attach(model, x[:4], round_to=None if form == "single" else given.round_to)
    begin = time.perf_counter()
    with judged(None if form == "single" else form):
        result = espalier.fit(
            gated, (x[: ends[0]], y[: ends[0]]), epochs=about["epochs"], batch_size=about["batch"], cost=given.cost,
            target=target, seed=seed, quiet=True,
        )  # fmt: skip
    network = result.model.eval()
    with torch.no_grad():
        wrong = network(x[ends[0] : ends[1]]).argmax(-1) != y[ends[0] : ends[1]]
    widths = [len(m.weight) for m in network.modules() if isinstance(m, (nn.Linear, nn.Conv2d))][:-1]
    mask = result.mask
    cost = gated.cost(given.cost)
    share = float(cost(mask.double()) / cost(torch.ones(gated.d, dtype=torch.float64)))
    return {
        "error": round(100 * wrong.double().mean().item(), 3),
        "share": round(share, 5),
        "widths": widths,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def rows_of(lines: list[dict[str, Any]], key: str, measure: str, digits: int) -> list[str]:
    """A row for each form, a column for each target; differences are to the first form, on the same seeds."""
    targets = sorted({line["target"] for line in lines}, reverse=True)
    rows = ["| size of a gate | " + " | ".join(f"{100 * target:g}%" for target in targets) + " |"]
    rows.append("|---|" + "---|" * len(targets))
    for form in WORDS:
        cells = []
        for target in targets:
            found = {
                f: {one["seed"]: one[measure] for one in lines if (one[key], one["target"]) == (f, target)}
                for f in ("slope", form)
            }
            own, others = found[form], found["slope"]
            apart = [own[seed] - others[seed] for seed in own if seed in others]
            shown = f"{mean(list(own.values())):.{digits}f}, n = {len(own)}" if own else ""
            if form != "slope" and len(apart) > 1:
                shown += f" ({mean(apart):+.{digits}f} ± {half(apart):.{digits}f})"
            cells.append(shown)
        if any(cells):
            rows.append(f"| {WORDS[form]} | " + " | ".join(cells) + " |")
    return rows


def table(lines: list[dict[str, Any]]) -> str:
    pieces = [
        "After the sign, half of the 95% interval of the difference to the first row, on the same seeds. One core."
    ]
    heads = [line for line in Lines(HEADS) if line["kinds"] == "units,heads" and not line["recipe"]]
    pieces.append(
        "Heads of a small language model, as in [evidence](evidence.md#what-smaller-trials-say): perplexity of a byte."
    )
    pieces.append("\n".join(rows_of(heads, "size", "perplexity", 3)))
    for network, about in NETWORKS.items():
        own = [line for line in lines if line["network"] == network]
        if not own:
            continue
        pieces.append(
            f"{about['data']}, {network}, blocks of {own[0]['round_to']}, {about['epochs']} epochs of "
            f"{about['train']:,} images: error in % of {about['held_out']:,} held-out training images, by the share of "
            f"{own[0]['cost']}."
        )
        pieces.append("\n".join(rows_of(own, "form", "error", 2)))
    for path in EXACT:
        story, records = read(path)
        units = "-".join(map(str, story["settings"]["units"]))
        pieces.append(
            f"By enumeration, as [below](#measured-by-enumeration): six gates on {units} units in each of two layers, "
            f"{story['settings']['weights']} networks for each theta."
        )
        pieces.append(over_all(records, "apart", BY_UNITS))
    commands = [*dict.fromkeys(line["command"] for line in lines), *(read(path)[0]["command"] for path in EXACT)]
    return "\n\n".join([*pieces, "```console\n" + "\n".join(f"$ {command}" for command in commands) + "\n```"])


def main() -> None:
    parser = arguments(__doc__, OUT)
    parser.add_argument("--network", choices=NETWORKS, default="mlp")
    parser.add_argument("--forms", default=",".join(WORDS))
    parser.add_argument("--targets", default="0.2,0.1,0.05")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--round-to", type=int, default=8)
    parser.add_argument("--cost", default="weights")
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    lines = Lines(given.out)
    if given.into:
        lines.put(given.into, MARKS, table)
        return
    torch.set_num_threads(1)
    words = [word for word in sys.argv[1:] if word != "--data-dir" and word != str(given.data_dir)]
    for seed, target, form in itertools.product(
        map(int, given.seeds.split(",")), map(float, given.targets.split(",")), given.forms.split(",")
    ):
        setting = {"network": given.network, "round_to": given.round_to, "cost": given.cost}
        setting |= {"form": form, "target": target, "seed": seed}
        if lines.hold(setting):
            continue
        line = setting | run(given, form, target, seed)
        line |= {"torch": str(torch.__version__), "cpu": platform.processor() or platform.machine()}
        line |= {"commit": revision(), "command": shlex.join(["python", "benchmarks/wide_gates.py", *words])}
        lines.add(line)
        print(
            f"{form} {target:g} seed {seed}: {line['error']:.2f}% wrong, {line['widths']}, {line['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
