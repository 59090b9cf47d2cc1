"""`espalier train` by several ranks, of which one is killed or stopped: started by test_ranks_lost.py in a process of
its own, which imports torch once; every rank is a fork, a process with the exit code and the words of the command.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from torch import nn

import espalier
from espalier.cli import main
from espalier.train import loop

TIMEOUT = 2.0


def network() -> nn.Module:
    """In float64, so that rounding does not grow into another structure."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)).double()


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start(folder: Path, count: int, own: dict[int, list[str]] | None = None) -> list[int]:
    """The ranks of one command; own: what a rank is told beside it."""
    where, words = port(), ["--model", f"{__file__}:network", "--target", "0.4", "--epochs", "12", "--seed", "3"]
    words += [
        "--batch-size",
        "48",
        "--out",
        str(folder),
        "--parallel",
        "data",
        "--rank-timeout",
        str(TIMEOUT),
        "--quiet",
        "--json",
    ]
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            for number in (1, 2):
                os.dup2(
                    os.open(folder.parent / f"{folder.name}.{rank}.{number}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC),
                    number,
                )
            if count > 1:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
                os.environ |= {"MASTER_PORT": str(where), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            sys.argv = ["espalier", "train", *words, *(own or {}).get(rank, [])]
            loop.SAVING, loop.LOOK = 0.5, 0.02  # so that there are checkpoints to go on from
            code = 1
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.stdout.flush()
                os._exit(code)
        children.append(child)
    return children


def wait_for(folder: Path, update: int, child: int) -> None:
    limit = time.monotonic() + 60
    while time.monotonic() < limit and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if any(int(path.stem[11:]) >= update for path in folder.glob("checkpoint-*.safetensors")):
            return
        time.sleep(0.005)
    raise TimeoutError(f"no checkpoint after update {update} in {folder}")


def ended(children: list[int], folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, what was printed, and what was said of each rank; the code of one that a signal ended is below 0."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    texts = [[(folder.parent / f"{folder.name}.{r}.{n}").read_text() for n in (1, 2)] for r in range(len(codes))]
    return [(code, *text) for code, text in zip(codes, texts)]  # type: ignore[misc]


def lost(folder: Path, count: int, update: int, number: int) -> dict[str, object]:
    """Send a signal to the last rank, once this update is saved; how long the others took, and what they said."""
    children = start(folder, count)
    wait_for(folder, update, children[0])
    os.kill(children[-1], number)
    began = time.monotonic()
    others = ended(children[:-1], folder)
    took = time.monotonic() - began
    os.kill(children[-1], signal.SIGKILL)
    os.waitpid(children[-1], 0)
    return {"seconds": took, "others": others}


def run(root: Path) -> dict[str, object]:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports half of torch, which the forks then need not
    espalier.attach(network(), torch.zeros(4, 64, dtype=torch.float64))  # and this the other half
    whole, broken = root / "whole", root / "broken"
    (undisturbed,) = ended(start(whole, 1), whole)
    killed = lost(broken, 3, 40, signal.SIGKILL)  # while it searches
    hung = lost(broken, 2, 200, signal.SIGSTOP)  # once it is settled, and trains the compact network
    (finished,) = ended(start(broken, 1), broken)
    other = root / "other"
    disagreed = ended(start(other, 2, {1: ["--seed", "4"]}), other)
    missing = ended(start(other, 2, {1: ["--data", "nowhere.npz"]}), other)
    return {
        "undisturbed": undisturbed, "killed": killed, "hung": hung, "finished": finished, "disagreed": disagreed,
        "missing": missing, "written": sorted(path.name for path in other.glob("*")) if other.exists() else [],
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
