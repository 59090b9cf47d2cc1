"""A run that is killed again and again: started by test_fit_killed.py in a process of its own.

torch is imported once; every attempt is a fork, which SIGKILL ends at a random moment, in the middle of whatever it was
doing. The next attempt is the same call. What comes out must be, bit for bit, what an undisturbed run gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import networks
import torch
from torch.nn import functional as F

import espalier
from espalier.train import loop


def attempt(folder: Path, kind: str) -> None:
    """The call, and a digest of everything it gave."""
    loop.SAVING, loop.LOOK = 0.5, 0.0  # so that many kills fall into the writing of a checkpoint
    torch.use_deterministic_algorithms(True)
    if kind == "sweep":
        return swept(folder)
    data, test = networks.digit_vectors(320)
    source = networks.loader(data, 32) if kind == "loader" else data
    model = networks.mixed_network()
    result = espalier.fit(
        model,
        source,
        loss=F.cross_entropy,
        epochs=12,
        batch_size=32,
        target=0.3,
        seed=5,
        validation=test,
        checkpoint=folder,
        quiet=True,
    )
    tensors = {**model.state_dict(), **{f"small.{k}": v for k, v in result.model.state_dict().items()}}
    tensors |= {"mask": result.mask, "theta": result.theta, "next": result.search.ask()}
    write_digest(folder, tensors, [folder / "metrics.jsonl"])


def swept(folder: Path) -> None:
    """Four runs as one batch, each to its own target."""
    data, test = networks.digit_vectors(320)
    results = espalier.sweep(
        networks.mixed_network,
        data,
        targets=[0.3, 0.6],
        seeds=(0, 1),
        epochs=12,
        batch_size=32,
        validation=test,
        checkpoint=folder,
        quiet=True,
    )
    tensors = dict[str, torch.Tensor]()
    for i, result in enumerate(results):
        tensors |= {f"{i}.{k}": v for k, v in result.model.state_dict().items()}
        tensors |= {f"{i}.mask": result.mask, f"{i}.theta": result.theta}
    write_digest(folder, tensors, sorted(folder.rglob("metrics.jsonl")))


def write_digest(folder: Path, tensors: dict[str, torch.Tensor], metrics: list[Path]) -> None:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + str(tensor.dtype).encode() + tensor.contiguous().numpy().tobytes())
    rows = [json.loads(line) for path in metrics for line in path.read_text().splitlines()]
    for row in rows:
        row.pop("seconds")
    digest.update(json.dumps(rows).encode())
    (folder / "digest").write_text(f"{len(rows)} {digest.hexdigest()}")


def fork(folder: Path, kind: str) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            attempt(folder, kind)
            code = 0
        finally:
            os._exit(code)
    return child


def wait_for_a_save(folder: Path, child: int) -> None:
    """Until the child has saved something new, or is done (a dead child stays a zombie until it is waited for)."""

    def saved() -> set[str]:
        return {path.name for path in folder.rglob("checkpoint-*.safetensors")}

    before = saved()
    while not saved() - before and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.002)


def main(root: Path, kills: int, kind: str) -> dict[str, object]:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports half of torch, which the forks then need not
    began = time.monotonic()
    status = os.waitpid(fork(root / "undisturbed", kind), 0)[1]
    assert status == 0, "the undisturbed run failed"
    whole = time.monotonic() - began
    expected = (root / "undisturbed" / "digest").read_text()

    chance = random.Random(int.from_bytes(os.urandom(8)))
    killed, partial, resumed, digests = 0, 0, 0, list[str]()
    run = 0
    while True:
        folder = root / f"run{run}"
        resumed += bool(list(folder.rglob("checkpoint-*.safetensors")))
        child = fork(folder, kind)
        if killed < kills:
            if killed % 2:  # on a busy machine a kill by the clock alone may always come before the first checkpoint
                wait_for_a_save(folder, child)
            time.sleep(chance.uniform(0.0, 0.3) * whole)
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status):
            killed += 1
            partial += bool(list(folder.rglob("*.partial")))
            continue
        assert status == 0, "a resumed run failed"
        digests.append((folder / "digest").read_text())
        run += 1
        if killed >= kills:
            break
    return {
        "expected": expected,
        "digests": digests,
        "killed": killed,
        "while_writing": partial,
        "resumed": resumed,
        "seconds": time.monotonic() - began,
        "one": whole,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
