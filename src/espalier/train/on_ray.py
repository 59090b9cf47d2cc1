"""Batches of runs as tasks of Ray, on one machine or on a cluster: each is begun again from its checkpoint where its
worker dies. They write the files that they write without it, into one folder, which every machine sees.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.files import NotSaved
from espalier.space import BadInput, BadType, EspalierError, first_line
from espalier.train import checks
from espalier.train.loop import Stop
from espalier.train.progress import Progress

Task = Callable[..., tuple[bool, Any]]  # of what all share, what is its own, seconds: whether it is done, what came out
GRACE = 60.0  # seconds that a task may take beyond its limit before its worker counts as hung and is ended
ANSWER = 10.0  # seconds in which a cluster has to answer
OWN = "espalier_own_"  # modules that were read from a file of the user's, which no worker can import by name


@dataclass(frozen=True)
class Ray:
    """Where tasks run, and what each of them needs.

    address: of a cluster, as "10.0.0.1:6379", or "auto" for the one on this machine; None starts one here. cpus, gpus:
    of one task; gpus may be a part, as 0.25, so that four share a device. time_limit: seconds after which a task makes
    room for others, with a checkpoint, and is queued again. retries: how often a task whose worker died is begun again.
    """

    address: str | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    time_limit: float | None = None
    retries: int = 3

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise BadInput(f"{name} of a task is a number from 0 up, not {value!r}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise BadInput(f"gpus of a task is a part of one, as 0.25, or a whole number, not {self.gpus!r}")
        Stop(self.time_limit)

    def carry_out(
        self, task: Task, shared: Any, jobs: Mapping[str, Any], folder: Path, stop: Stop, shown: Progress
    ) -> dict[str, Any]:
        """The outcome of each job, by its name. Of those that ``stop`` left unfinished, their state so far.

        task: is called with what all jobs share, the job, and the seconds that it may take, in the folder that this
        process is in. folder: what they write to.
        """
        ray = checks.needed("ray", "executor='ray' needs Ray, which is not there: pip install 'espalier[ray]'")
        began = not ray.is_initialized()
        if began:
            self._connect(ray)
        try:
            self._check(ray, folder)
            return self._run(ray, task, shared, jobs, stop, shown)
        finally:
            if began:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            if self.address is None and "RAY_ADDRESS" not in os.environ:
                ray.init(include_dashboard=False, **quiet)
                return
            _answers(self.address or os.environ["RAY_ADDRESS"])
            ray.init(address=self.address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            place = self.address or "this machine"
            raise BadInput(
                f"no Ray cluster answers at {place}: {first_line(error)}. Start one by `ray start --head`"
            ) from error

    def _check(self, ray: Any, folder: Path) -> None:
        """What cannot work is said before anything is trained."""
        there = ray.cluster_resources()
        for name, wanted in (("GPU", self.gpus), ("CPU", self.cpus)):
            if wanted > there.get(name, 0):
                raise BadInput(f"a task asks for {wanted:g} {name}s, and the cluster has {there.get(name, 0):g}")
        others = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerHostname"] != platform.node()]
        if not others:
            return
        token = folder.resolve() / f".seen-by-all-{secrets.token_hex(8)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            token.touch()
        except OSError as error:
            raise NotSaved(error.errno, f"{folder} could not be written: {error.strerror}") from error
        try:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            look = ray.remote(os.path.exists)
            seen = [
                look.options(num_cpus=0, scheduling_strategy=affinity(node["NodeID"], soft=False)).remote(str(token))
                for node in others
            ]
            for node, its in zip(others, ray.get(seen, timeout=ANSWER * 6)):
                if not its:
                    raise BadInput(
                        f"{node['NodeManagerHostname']} does not see {folder.resolve()}; a folder that all machines "
                        "share is needed, for checkpoints and run directories"
                    )
        finally:
            token.unlink(missing_ok=True)

    def _run(
        self, ray: Any, task: Task, shared: Any, jobs: Mapping[str, Any], stop: Stop, shown: Progress
    ) -> dict[str, Any]:
        for name, module in list(sys.modules.items()):
            if name.startswith(OWN):
                ray.cloudpickle.register_pickle_by_value(module)
        end = None if stop.end is None else time.time() + stop.end - time.monotonic()
        common = ray.put((task, shared, os.getcwd(), self.time_limit, end))
        remote = ray.remote(_task).options(num_cpus=self.cpus, num_gpus=self.gpus, max_retries=self.retries)
        left = {remote.remote(common, job): name for name, job in jobs.items()}
        results = dict[str, Any]()
        try:
            while left:
                ready, _ = ray.wait(list(left), timeout=1.0)
                if stop.interrupted:
                    break
                for ref in ready:
                    name = left.pop(ref)
                    finished, value = self._taken(ray, ref, name)
                    results[name] = value
                    if finished:
                        shown.say(f"{name}: done, {len(jobs) - len(left)} of {len(jobs)}")
                    elif not stop.now():
                        left[remote.remote(common, jobs[name])] = name
        finally:
            for ref in left:  # each ends after the update it is in, with a checkpoint
                ray.cancel(ref)
            if left:
                ray.wait(list(left), num_returns=len(left), timeout=GRACE)
        if stop.interrupted:
            raise KeyboardInterrupt
        return results

    def _taken(self, ray: Any, ref: Any, name: str) -> tuple[bool, Any]:
        try:
            finished, value = ray.get(ref)
            return bool(finished), value
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EspalierError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            raise BadInput(
                f"{name}: its worker died {self.retries + 1} times ({type(error).__name__}): out of memory, or its "
                "machine is gone? What was saved is intact, and the same call goes on from it"
            ) from error


def read(executor: object) -> Ray | None:
    """What a call's ``executor`` says; None: this process trains."""
    if executor is None or isinstance(executor, Ray):
        return executor
    if executor != "ray":
        raise BadType(f"executor is 'ray' or settings such as Ray(address='auto', gpus=0.5), not {executor!r}")
    return Ray()


def _answers(address: str) -> None:
    """A connection to a cluster that is named by host and port; Ray itself waits for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), timeout=ANSWER).close()


def _task(common: tuple[Task, Any, str, float | None, float | None], job: Any) -> tuple[bool, Any]:
    """One job on a worker, in the folder of the caller; a worker that hangs ends itself, and Ray begins again."""
    task, shared, folder, time_limit, end = common
    os.chdir(folder)
    limits = [limit for limit in (time_limit, None if end is None else end - time.time()) if limit is not None]
    seconds = min(limits, default=None)
    if seconds is None:
        return task(shared, job, None)
    seconds = max(seconds, 1e-3)  # what time is over for tells where it stands
    hung = threading.Timer(seconds + GRACE, os._exit, [1])
    hung.daemon = True
    hung.start()
    try:
        return task(shared, job, seconds)
    finally:
        hung.cancel()
