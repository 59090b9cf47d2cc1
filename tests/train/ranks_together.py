"""Runs of several ranks: started by test_ranks.py in a process of its own.

torch is imported once; every rank is a fork. Each leaves a safetensors file of what came out of every case.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import networks
import safetensors.torch
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import espalier
from espalier.train import Recipe

LONG = ("data", "structure-ranked")  # of fifty updates; the others of twenty
CASES: dict[str, dict[str, Any]] = {
    # of the default recipe: one mask, whose slopes theta follows
    "data": {"parallel": "data"},
    # two masks, each with examples of its own
    "data-slopes": {"parallel": "data", "samples": 2},
    # two masks that share a mini-batch
    "data-ranked": {"parallel": "data", "recipe": "ranked"},
    "structure-ranked": {"parallel": "structure", "recipe": "ranked", "samples": 4},
    "structure-slopes": {"parallel": "structure", "samples": 4},
}


def network(seed: int = 0) -> nn.Module:
    """Convolutions with BatchNorm, and one operation of two, of which a mask runs one alone."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, 2, 1, bias=False),
        nn.BatchNorm2d(6),
        espalier.Mixed([nn.ReLU(), nn.Sequential(nn.Conv2d(6, 6, 1), nn.Tanh())]),
        nn.Conv2d(6, 8, 3, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).double()


def data(count: int = 320) -> tuple[Tensor, Tensor]:
    (x, y), _ = networks.digit_images(count)
    return x.double(), y


def fitted(case: str, **more: Any) -> dict[str, Tensor]:
    """Every number of a run that should be the same in one process and in several."""
    x, y = data()
    model = network(seed=dist.get_rank() if dist.is_initialized() else 0)  # all start with the weights of the first
    epochs = 5 if case in LONG else 2
    settings: dict[str, Any] = {"target": 0.4, "cost": "macs", "epochs": epochs, "batch_size": 32, "seed": 3}
    settings |= CASES[case] | more
    result = espalier.fit(model, (x, y), validation=(x[:100], y[:100]), quiet=True, **settings)
    assert result.updates == 10 * epochs
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if "running" not in name}
    tensors |= {f"small.{name}": value for name, value in result.model.state_dict().items()}
    tensors |= {"theta": result.theta, "mask": result.mask}
    tensors["history"] = torch.tensor([[row["loss"], row["validation_loss"]] for row in result.history])
    if case == "data":  # the share of wrong answers is of the whole batch; of several masks one speaks
        tensors["errors"] = torch.tensor([row["error"] for row in result.history])
    return tensors


def closed() -> dict[str, Tensor]:
    """A loop of one's own in which a whole layer is closed under every mask of this rank, and not under others."""
    x, y = data(64)
    torch.manual_seed(0)
    body, side = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU()), nn.Linear(6, 4)
    model = nn.Sequential(body, espalier.Mixed([nn.Sequential(side, nn.ReLU(), nn.Linear(4, 6)), nn.Identity()]))
    model.append(nn.Linear(6, 10)).double()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    several = "structure" if dist.is_initialized() else None
    recipe = Recipe(begin=0.0, initial=0.9, settle=0.2, ramp=0.5)
    shaping = espalier.shape(model, x[:4], inner, updates=10, samples=4, penalty=0.0, recipe=recipe, parallel=several)

    def closure(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(shaping.network(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    used = []
    for _ in range(10):
        shaping.step(closure, x, y)
        used.append(side.weight.grad is not None)
    shaping.write_back()
    return {"theta": shaping.search.theta, "used": torch.tensor(used)} | dict(model.state_dict())


def loaders() -> dict[str, Tensor]:
    """A loader that shuffles, and dropout: every rank reads the same order, and has noise of its own. A sampler that
    gives every rank its share."""
    x, y = data(96)
    noise = list[Tensor]()

    class Noisy(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.training and torch.is_grad_enabled() and len(noise) < 40 and len(x) > 4:
                noise.append((y == 0).double().reshape(-1)[:16].clone())
            return y

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), Noisy(0.5), nn.Linear(12, 10)).double()
    several = {"parallel": "data"} if dist.is_initialized() else {}
    loader = DataLoader(TensorDataset(x, y), 40, shuffle=True)  # 40, 40, 16
    result = espalier.fit(model, loader, epochs=3, target=0.5, quiet=True, **several)
    found = {"noise": torch.stack(noise), "loader_theta": result.theta}
    if dist.is_initialized():
        sampler: Any = DistributedSampler(TensorDataset(x, y), seed=1)
        own = DataLoader(TensorDataset(x, y), 8, sampler=sampler)
        layers = [nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10)]
        model = nn.Sequential(*layers).double()
        result = espalier.fit(model, own, epochs=2, target=0.5, validation=(x, y), quiet=True, **several)
        found |= {"sampler_theta": result.theta, "sampler_loss": torch.tensor(result.validation_loss)}
    return found


def not_finite() -> dict[str, Tensor]:
    """Some masks give no number, of examples that one rank reads or of masks that one rank has: no rank moves."""
    ends = dict[str, Tensor]()
    for parallel in ("data", "structure"):
        model, x, y = networks.spoilt()
        several = parallel if dist.is_initialized() else None
        inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        settings: dict[str, Any] = {"samples": 4, "penalty": 0.0, "recipe": "paper", "seed": 1}
        shaping = espalier.shape(model, x[:4], inner, updates=4, parallel=several, **settings)
        kept = []

        def closure(inputs: Tensor, targets: Tensor, shaping: Any = shaping) -> Tensor:
            loss = F.cross_entropy(shaping.network(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for part in torch.arange(64).split(16):  # the second and the third are spoilt
            batch, before = (x[part], y[part]), model[0].weight.detach().clone()
            share = shaping.ranks is not None and parallel == "data"
            shaping.step(closure, *(shaping.ranks.share(batch) if share else batch))  # type: ignore[union-attr]
            kept.append(model[0].weight.equal(before))
        ends |= {f"{parallel} {name}": value for name, value in model.state_dict().items()}
        ends |= {f"{parallel} theta": shaping.search.theta, f"{parallel} kept": torch.tensor(kept)}
    return ends


def refusals() -> dict[str, str]:
    """What is said where ranks differ, and of what ranks cannot train."""
    rank = dist.get_rank()
    (x, y), simple = data(64), {"epochs": 1, "target": 0.5, "quiet": True}

    def mlp() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)).double()

    def sharded() -> Any:
        model = mlp()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model

    different = x.clone()
    different[3, 0, 0, 0] += rank
    cases: dict[str, Any] = {
        "seed": lambda: espalier.fit(mlp(), (x, y), seed=rank, parallel="data", **simple),
        "data": lambda: espalier.fit(mlp(), (different, y), parallel="data", **simple),
        "loss": lambda: espalier.fit(
            mlp(), (x, y), loss=[lambda a, b: F.cross_entropy(a, b), F.cross_entropy][min(rank, 1)],
            parallel="data", **simple,
        ),
        "loader": lambda: espalier.fit(
            mlp(), DataLoader(TensorDataset(x, y), 32, shuffle=True, generator=torch.Generator().manual_seed(rank)),
            parallel="data", **simple,
        ),
        "network": lambda: espalier.fit(mlp() if rank else network(), (x, y), parallel="data", **simple),
        "masks": lambda: espalier.fit(mlp(), (x, y), parallel="structure", **simple),
        "silent": lambda: espalier.fit(mlp(), (x, y), **simple),
        "batch": lambda: espalier.fit(mlp(), (x, y), batch_size=dist.get_world_size() + 1, parallel="data", **simple),
        "wrapped": lambda: espalier.fit(nn.parallel.DistributedDataParallel(mlp()), (x, y), parallel="data", **simple),
        "sharded": lambda: espalier.fit(sharded(), (x, y), parallel="data", **simple),
        "word": lambda: espalier.fit(mlp(), (x, y), parallel="date", **simple),
    }  # fmt: skip
    said = dict[str, str]()
    for name, call in cases.items():
        try:
            call()
            said[name] = "nothing"
        except espalier.EspalierError as error:
            said[name] = str(error)
        dist.barrier()
    alone = espalier.fit(mlp(), (x, y), seed=rank, parallel="none", **simple)
    said["none"] = str(alone.theta.sum().item())
    return said


def work(rank: int, count: int, folder: Path) -> None:
    if count > 1:
        store = dist.FileStore(str(folder / f"store-{count}"), count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    tensors = dict[str, Tensor]()
    for case in CASES if count < 4 else LONG:
        more = {} if count > 1 else {"parallel": None}
        tensors |= {f"{case}/{name}": value for name, value in fitted(case, **more).items()}
    tensors |= {f"closed/{name}": value for name, value in closed().items()}
    if count < 4:
        tensors |= {f"not-finite/{name}": value for name, value in not_finite().items()}
        tensors |= {f"loaders/{name}": value for name, value in loaders().items()}
    said = refusals() if count == 2 else {}
    kept = {name: copy.deepcopy(value.detach()).contiguous() for name, value in tensors.items()}
    safetensors.torch.save_file(kept, folder / f"{count}-{rank}.safetensors", {"said": repr(said)})
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()


def main(folder: Path, counts: list[int]) -> int:
    """All ranks of one count at a time."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports half of torch, which the forks then need not
    espalier.attach(network(), data(4)[0])  # and this the other half
    for count in counts:
        began, children = time.monotonic(), []
        for rank in range(count):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    warnings.simplefilter("ignore")
                    work(rank, count, folder)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitpid(child, 0)[1] for child in children]
        print(f"{count} ranks: {time.monotonic() - began:.1f} s, {codes}", flush=True)
        if any(codes):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]))
