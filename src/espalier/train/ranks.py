"""Processes that train one run together, by torch.distributed: what each of them computes, and what they tell others.

``parallel="data"``: every rank draws the same masks and reads its own share of the mini-batch. ``"structure"``: every
rank reads the same mini-batch under masks of its own; where an update has one mask, shares of the batch again.

An update sends the losses, the slopes and, once, the gradient. Masks are drawn by every rank from the same generator
and never sent. All of it is sums over the ranks, which every rank gets bit for bit alike, so that theta and the weights
stay the same everywhere. Gradients are added up by messages of our own and not by DistributedDataParallel: that sends
them in every backward pass, of which an update has one for each mask, and it holds on to parameters that are exchanged
when the structure settles. Nothing is sent by pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from espalier.space import BadInput, BadType, EspalierError, RankLost, first_line
from espalier.train import fingerprint, pytree
from espalier.train.checkpoint import FORMAT, differences, join_state, pack, split_state, unpack
from espalier.train.pytree import Nested
from espalier.train.setting import one_of

MODES = ("data", "structure")
BUCKET = 1 << 24  # numbers in one message of gradients: the memory that this takes beside them
PIECE = 1 << 26  # bytes in one message of a state


class Ranks:
    """The processes of torch's default group. ``number`` of ``count``: which one this is. ``sent``: bytes that it has
    handed over to be summed, beside those of set-up."""

    def __init__(self, parallel: str) -> None:
        one_of("parallel", parallel, MODES)
        self.parallel, self.number, self.count = parallel, dist.get_rank(), dist.get_world_size()
        kinds = {device.type for device in dist.group.WORLD._device_types}  # type: ignore[union-attr]
        self.place = torch.device("cpu" if "cpu" in kinds else "cuda")  # of words
        self.begun = self.agreed = False
        self.sent = 0

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and speaks to people."""
        return self.number == 0

    # ---- before anything is trained ----------------------------------------------------------------------------------

    def begin(self, module: nn.Module) -> None:
        """Once: the same code and network everywhere, with the weights of the first rank."""
        if self.begun:
            return
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise BadInput("gradients are added up over the ranks here: give model.module, not DistributedDataParallel")
        if any(hasattr(parameter, "device_mesh") for parameter in module.parameters()):
            raise BadInput(
                "the parameters are sharded (FSDP2, DTensor), and gates cut whole tensors; give the model before "
                "fully_shard: every rank holds all of it"
            )
        self.agree(
            {"parallel": self.parallel, "model": fingerprint.network(module), "versions": fingerprint.versions()}
        )
        self.same([*module.parameters(), *module.buffers()])
        self.begun = True

    def check(self, samples: int, kinds: Sequence[str]) -> None:
        """Refuse what several ranks cannot train. kinds: of cost that count."""
        if self.parallel == "structure" and samples < self.count:
            raise BadInput(
                f"parallel='structure': an update has {samples} mask{'s' if samples > 1 else ''} for {self.count} "
                f"ranks; give samples={self.count} or a multiple, or parallel='data'"
            )
        if self.count > 1 and any(kind.startswith("latency") for kind in kinds):
            raise BadInput("latency is measured, on every rank another one; with several ranks count macs or weights")

    # ---- what a rank computes ----------------------------------------------------------------------------------------

    def share(self, batch: Nested, parts: int = 1) -> Nested:
        """This rank's share of a mini-batch, of each of its parts, all of equal size.

        A batch that cannot be shared equally, as the short one at the end of an epoch, is read whole by every rank:
        that is no faster and just as exact.
        """
        size = pytree.count(batch, "inputs and targets")
        if size % (parts * self.count):
            return batch
        each = size // parts // self.count
        starts = [part * (size // parts) + self.number * each for part in range(parts)]
        return pytree.join([pytree.each(lambda t, a=a: t[a : a + each], batch) for a in starts])  # type: ignore[misc]

    def rows(self, samples: int) -> slice:
        """Which of so many masks are this rank's."""
        ends = [round(samples * rank / self.count) for rank in (self.number, self.number + 1)]
        return slice(*ends)

    @contextmanager
    def computing(self, *about: object, sharing: bool) -> Iterator[None]:
        """Inside, torch's random numbers are this rank's own, as those of dropout should be; afterwards they go on as
        on all others. about: which numbers, so that a run that is resumed draws them again. sharing: BatchNorm over
        what all of them read."""
        digest = hashlib.sha256(repr((*about, self.number)).encode()).digest()
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices), WholeBatch(self) if sharing else nullcontext():
            for generator in (torch.default_generator, *(torch.cuda.default_generators[place] for place in devices)):
                generator.manual_seed(int.from_bytes(digest[:8], "little"))
            yield

    # ---- sums over the ranks -----------------------------------------------------------------------------------------

    def _send(self, function: Callable[..., Any], numbers: Tensor, *about: Any) -> None:
        try:
            function(numbers, *about)
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.number} of {self.count} has lost another one, which was killed, has failed or hangs "
                f"({_said(error)}). The same call, with any number of ranks, goes on from the last checkpoint"
            ) from error

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over the ranks."""
        numbers = numbers.detach().clone(memory_format=torch.contiguous_format)
        self.sent += numbers.numel() * numbers.element_size()
        self._send(dist.all_reduce, numbers)
        return numbers

    def mean(self, numbers: Tensor) -> Tensor:
        return self.total(numbers) / self.count

    def most(self, *numbers: float) -> list[float]:
        """Of each number the largest of all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.place)
        self._send(dist.all_reduce, tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def placed(self, own: Tensor, where: slice, rows: int) -> Tensor:
        """The rows ``(rows, ..)`` of all ranks, of which this one has some."""
        everyone = own.new_zeros((rows, *own.shape[1:]))
        everyone[where] = own
        return self.total(everyone)  # a sum with zeros: every bit is kept, and what is not finite

    def add_up(self, parameters: Sequence[Tensor], weight: float) -> None:
        """Every gradient becomes the sum over the ranks, each rank's times its weight.

        What has no gradient here and has one elsewhere, as a layer that only other masks use, takes part with zeros;
        what has none anywhere keeps none.
        """
        for bucket in _buckets(parameters):
            gradients = [parameter.grad for parameter in bucket]
            if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
                raise BadInput("sparse gradients are not added up over ranks; use nn.Embedding(sparse=False)")
            there = bucket[0].new_tensor([float(gradient is not None) for gradient in gradients])
            flat = [p.new_zeros(p.numel()) if g is None else g.reshape(-1) for p, g in zip(bucket, gradients)]
            joined = torch.cat([*flat, there]).mul_(weight)
            self.sent += joined.numel() * joined.element_size()
            self._send(dist.all_reduce, joined)
            *pieces, anywhere = torch.split(joined, [parameter.numel() for parameter in bucket] + [len(bucket)])
            known = all(gradient is not None for gradient in gradients)  # else look, which waits for a GPU
            used = [True] * len(bucket) if known else (anywhere > 0).tolist()
            for parameter, gradient, piece, its in zip(bucket, gradients, pieces, used):
                if its:
                    parameter.grad = torch.empty_like(parameter) if gradient is None else gradient
                    parameter.grad.copy_(piece.view(parameter.shape))

    # ---- words -------------------------------------------------------------------------------------------------------

    def exchange(self, words: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank says, in JSON."""
        text = torch.frombuffer(bytearray(json.dumps(words), "utf-8"), dtype=torch.uint8)
        lengths = torch.zeros(self.count, dtype=torch.int64, device=self.place)
        lengths[self.number] = len(text)
        self._send(dist.all_reduce, lengths)
        table = torch.zeros(self.count, int(lengths.max()), dtype=torch.uint8, device=self.place)
        table[self.number, : len(text)] = text.to(self.place)
        self._send(dist.all_reduce, table)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(table.cpu(), lengths.tolist())]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks whose facts differ, before anything is trained; name what differs and where."""
        answers = self.exchange({"host": platform.node(), "facts": facts})
        for rank, answer in enumerate(answers):
            if "error" in answer:
                self.agreed = True  # all of them know
                raise BadInput(f"rank {rank} on {answer['host']}: {answer['error']}")
        ours = _flat(answers[0]["facts"])
        for rank, answer in enumerate(answers):
            differ = differences(ours, _flat(answer["facts"]), _short)
            if differ:
                self.agreed = True
                raise BadInput(
                    f"the ranks disagree, so nothing was trained. Rank 0 on {answers[0]['host']}, there, and "
                    f"rank {rank} on {answer['host']}, here: {'; '.join(differ)}. Start all of them with the same "
                    "code, data and settings"
                )

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Whoever fails inside, before all have ``agreed``, tells the others why, so that none of them waits."""
        try:
            yield
        except EspalierError as error:
            if not self.agreed and not isinstance(error, RankLost):
                self.agreed = True
                self.exchange({"host": platform.node(), "error": str(error)})
            raise

    def from_first(self, function: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """What the function gives on the first rank, a state of dicts, lists, numbers and tensors; what it raises there
        all ranks raise."""
        content, error = b"", None
        if self.first:
            try:
                tree, tensors = split_state(function())
                content = pack({"format": FORMAT, "state": tree}, tensors)
            except EspalierError as raised:
                error, content = raised, str(raised).encode()
        failed, length = (int(number) for number in self.most(float(error is not None), float(len(content))))
        whole = torch.empty(length, dtype=torch.uint8, device=self.place)
        if self.first:
            whole.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        for piece in torch.split(whole, PIECE):
            self._send(dist.broadcast, piece, 0)
        if error is not None:
            raise error
        content = whole.cpu().numpy().tobytes()
        if failed:
            raise BadInput(content.decode())
        header, tensors = unpack(content)
        return join_state(header["state"], tensors)  # type: ignore[no-any-return]

    @contextmanager
    def held_by_first(self, hold: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """The first rank holds something for all of them."""
        with ExitStack() as stack:
            self.from_first(lambda: {"held": stack.enter_context(hold()) is not None})
            yield

    def same(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor as it is on the first rank."""
        for tensor in tensors:
            value = tensor.detach().contiguous()
            self._send(dist.broadcast, value, 0)
            if value.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(value)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one type and device, together not much more than a message holds; on all ranks the same."""
    alike = dict[tuple[torch.dtype, torch.device], list[Tensor]]()
    for parameter in parameters:
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for several in alike.values():
        bucket, numbers = list[Tensor](), 0
        for parameter in several:
            if bucket and numbers + parameter.numel() > BUCKET:
                yield bucket
                bucket, numbers = [], 0
            bucket.append(parameter)
            numbers += parameter.numel()
        yield bucket


def _flat(facts: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """What is nested by names such as data.sha256."""
    flat = dict[str, Any]()
    for key, value in facts.items():
        flat |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return flat


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:60]}..{text[-50:]} ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _said(error: Exception) -> str:
    """What torch says, without the place in its own source and without its advice."""
    return re.sub(r"^\[[^]]*\]\s*", "", first_line(error)).partition(". ")[0][:160]


def read(parallel: object) -> Ranks | None:
    """What a call's ``parallel`` says; None: this process trains by itself."""
    if isinstance(parallel, Ranks):
        return parallel
    if parallel is not None and not isinstance(parallel, str):
        raise BadType(f"parallel is 'data', 'structure' or 'none', not {parallel!r}")
    if parallel is not None:
        one_of("parallel", parallel, (*MODES, "none"))
    if not (dist.is_available() and dist.is_initialized()):
        processes = os.environ.get("WORLD_SIZE", "1")
        if parallel in MODES and processes != "1":
            raise BadInput(
                f"parallel={parallel!r}: this is one of {processes} processes, and there is no process group; call "
                "torch.distributed.init_process_group() first"
            )
        return None
    if parallel is None and dist.get_world_size() > 1:
        raise BadInput(
            f"there is a process group of {dist.get_world_size()} ranks: say parallel='data' (each its share of the "
            "mini-batch), 'structure' (each its own masks), or 'none' (each a run of its own)"
        )
    return Ranks(parallel) if parallel in MODES else None


@contextmanager
def started(parallel: str, device: str, timeout: float) -> Iterator[Ranks | None]:
    """The ranks that torchrun has started, as one group for as long as this lasts; None for one process alone.

    timeout: seconds after which a rank that does not answer counts as lost.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if "RANK" not in os.environ or (processes == 1 and not parallel):
        yield None
        return
    if not parallel:
        raise BadInput(
            f"{processes} processes were started: say --parallel data (each its share of the mini-batch) or --parallel "
            "structure (each its own masks)"
        )
    one_of("--parallel", parallel, MODES)
    cuda = device.startswith("cuda")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cuda and here > torch.cuda.device_count():
        raise BadInput(
            f"{here} ranks on this machine, and torch sees {torch.cuda.device_count()} CUDA devices; start so many, or "
            "use --device cpu"
        )
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"the {processes} ranks have not found each other: {_said(error)}") from error
    lost = False
    try:
        yield Ranks(parallel)
    except RankLost:
        lost = True
        raise
    finally:
        if not lost:  # a group that has lost a rank cannot be left in order
            dist.destroy_process_group()


# ---- BatchNorm over a mini-batch that several ranks share ------------------------------------------------------------


class WholeBatch(TorchFunctionMode):
    """Inside, ``batch_norm`` in train mode takes the statistics of all ranks' examples, as in one process.

    A reduction of our own, since torch's SyncBatchNorm takes GPUs alone. It acts on calls of ``batch_norm`` while it is
    on, and leaves no trace in a model. A call sends C + 1 and then C numbers forwards, 2 C backwards, however many
    ranks there are: the mean first, then the squares of what differs from it, so that nothing cancels.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm:
            return _batch_norm(self.ranks, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def _batch_norm(
    ranks: Ranks,
    input: Tensor,  # the names of torch's function
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    normed, mean, variance, count = _Normed.apply(input, eps, ranks)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var), momentum)
    shape = _shape(input)
    normed = normed if weight is None else normed * weight.view(shape)
    normed = normed if bias is None else normed + bias.view(shape)
    return normed.to(input.dtype)  # type: ignore[no-any-return]


def _shape(x: Tensor) -> tuple[int, ...]:
    return (1, -1, *[1] * (x.ndim - 2))


class _Normed(torch.autograd.Function):
    """x less its mean, over its deviation: of the examples of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, ranks: Ranks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims, shape, channels = [dim for dim in range(x.ndim) if dim != 1], _shape(x), x.shape[1]
        count = wide.new_full((1,), wide.numel() // channels)
        sums, total = torch.split(ranks.total(torch.cat([wide.sum(dims), count])), [channels, 1])
        mean = sums / total
        apart = wide - mean.view(shape)
        variance = ranks.total(apart.square().sum(dims)) / total
        scale = (variance + eps).rsqrt()
        normed = apart * scale.view(shape)
        ctx.save_for_backward(normed, scale, total)
        ctx.ranks, ctx.dtype = ranks, x.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return normed, mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        normed, scale, total = ctx.saved_tensors
        dims, shape = [dim for dim in range(slope.ndim) if dim != 1], _shape(slope)
        sums = ctx.ranks.total(torch.stack([slope.sum(dims), (slope * normed).sum(dims)])) / total
        inner = slope - sums[0].view(shape) - normed * sums[1].view(shape)
        return (inner * scale.view(shape)).to(ctx.dtype), None, None
