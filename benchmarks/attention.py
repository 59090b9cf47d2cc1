"""What is left of torch's attention against its fused encoder layer: inference, whole and with heads cut; prints JSON.

python benchmarks/attention.py > results/gates/attention.json

Every network is timed in turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import sys
import time

import torch
from torch import Tensor, nn

import espalier
from espalier.compact.layers import Attention

CASES = ((256, 8, 1024, 64, 16), (128, 4, 512, 128, 1), (64, 4, 256, 16, 64))  # width, heads, hidden, length, batch
REPEATS = 25


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def measured(width: int, heads: int, hidden: int, length: int, batch: int) -> dict[str, object]:
    """Milliseconds of processor time: the fused layer, ours at the full width, and ours with half the heads."""
    torch.manual_seed(0)
    model, x = Encoder(width, heads, hidden).eval(), torch.randn(batch, length, width)
    gated = espalier.attach(model, x, kinds=("heads",))
    half = gated.compact((torch.arange(gated.d) % 2).float()).eval()
    gated.detach()
    plain = copy.deepcopy(model)
    for layer in plain.encoder.layers:
        layer.self_attn = Attention(layer.self_attn, heads).eval()
    networks = {"fused": model, "plain": plain, "half_the_heads": half}
    times: dict[str, list[float]] = {name: [] for name in networks}
    with torch.no_grad():
        assert torch.allclose(plain(x), model(x), atol=1e-5)
        for repeat in range(REPEATS + 3):
            for name, network in networks.items():
                start = time.process_time()
                network(x)
                if repeat >= 3:
                    times[name].append(1e3 * (time.process_time() - start))
    medians = {f"{name}_ms": round(statistics.median(each), 3) for name, each in times.items()}
    about = {"width": width, "heads": heads, "hidden": hidden, "length": length, "batch": batch}
    return about | medians | {"plain_over_fused": round(medians["plain_ms"] / medians["fused_ms"], 3)}


def main() -> None:
    torch.set_num_threads(1)
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
    cases = [measured(*case) for case in CASES]
    json.dump({"machine": machine, "repeats": REPEATS, "cases": cases}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
