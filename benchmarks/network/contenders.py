"""The contenders: one training loop in which the line that wraps the model differs, and two bounds.

The clock runs from a barrier of all hosts, when nothing is under way any more, to the time at which the last of them is
done with everything. For `Delayed` that includes `finish()`, so that all exchanges of the timed iterations, and no
others, lie within the clock: what is under way after the last iteration is waited for and counts against us.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network import workload

CONTENDERS = {
    "none": "no communication",
    "comm": "all-reduce alone",
    "blocking": "blocking SGD",
    "ddp": "DDP",
    "ours": "ours, FullSync",
    "delayed1": "ours, Delayed(1)",
    "delayed2": "ours, Delayed(2)",
    "delayed3": "ours, Delayed(3)",
    "ddp-small": "DDP, buckets of 1 MB",
}
DEFAULT = tuple(name for name in CONTENDERS if name != "ddp-small")


@dataclass(frozen=True)
class Run:
    """One run of one contender on all hosts."""

    contender: str
    net: str
    iterations: int
    warmup: int = 5
    elsewhere: bool = False  # layers sleep instead of computing
    settle_s: float = 0.0  # that exchanges still under way after the warm-up need


def run(given: Run) -> dict[str, Any]:
    """Take part in a run, with torchrun's variables set; gives this host's side of the clock."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        return _communicate(given) if given.contender == "comm" else _train(given)
    finally:
        dist.destroy_process_group()


def wrapped(contender: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The one line that differs between contenders."""
    if contender == "ddp":
        return DistributedDataParallel(net)
    if contender == "ddp-small":
        return DistributedDataParallel(net, bucket_cap_mb=1)
    if contender in ("none", "blocking"):
        return net
    import quorate  # late: the others need torch alone

    policy = quorate.FullSync() if contender == "ours" else quorate.Delayed(int(contender.removeprefix("delayed")))
    return quorate.DataParallel(net, optimizer, policy)


def _train(given: Run) -> dict[str, Any]:
    net = workload.model(given.net, given.elsewhere)
    optimizer = workload.optimizer(net)
    model = wrapped(given.contender, net, optimizer)
    batches = workload.pictures(given.net, dist.get_rank())
    clock = _Clock()
    loss = torch.zeros(())
    for i in range(given.warmup + given.iterations):
        if i == given.warmup:
            _wait_for_updates(model)
            time.sleep(given.settle_s)
            clock.start()
        x, y = batches[i % len(batches)]
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if given.contender == "blocking":
            average([parameter.grad for parameter in net.parameters() if parameter.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    _wait_for_updates(model)
    stepped_s = time.monotonic()
    finish = getattr(model, "finish", None)
    if finish is not None and given.contender.startswith("delayed"):
        finish()
    found = clock.stop()
    weights = sum(float(parameter.detach().double().abs().sum()) for parameter in net.parameters())
    if finish is not None:
        finish()  # again: nothing is left to do
    return {**found, "finish_s": found["end_s"] - stepped_s, "loss": loss.item(), "weights": weights}


def _wait_for_updates(model: nn.Module) -> None:
    """Until every update is applied that the next iteration reads: only ours goes on before that."""
    synchronize = getattr(model, "synchronize", None)
    if synchronize is not None:
        synchronize()


def average(gradients: list[Tensor]) -> None:
    """Blocking SGD's: one flat all-reduce of all gradients."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    averages = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, averaged in zip(gradients, averages, strict=True):
        gradient.copy_(averaged.view_as(gradient))


def _communicate(given: Run) -> dict[str, Any]:
    flat = torch.zeros(workload.parameter_bytes(given.net) // 4)
    for _ in range(given.warmup):
        dist.all_reduce(flat)
    clock = _Clock()
    clock.start()
    for _ in range(given.iterations):
        dist.all_reduce(flat)
    return clock.stop()


class _Clock:
    """When this host began and ended; hosts are namespaces of one machine, so all read the same clock."""

    def start(self) -> None:
        dist.barrier()
        self._cpu_s = _cpu_s()
        self._start_s = time.monotonic()

    def stop(self) -> dict[str, Any]:
        end_s = time.monotonic()
        return {"start_s": self._start_s, "end_s": end_s, "cpu_s": _cpu_s() - self._cpu_s}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
