"""A host's side of the stragglers: the worlds of `benchmarks.local`, its net, data and draws, under DDP or ours.

A worker's sleep stands for work that takes long. Under ours it looks every millisecond whether its version is over, as
a loop of the user's own would, and then leaves the iteration. Late work that is abandoned leaves a worker one draw a
version; where it finishes (late="finish"), a worker has one draw after the other, as in the simulator.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.local import workload

CONTENDERS = {
    "comm": "all-reduce alone",
    "none": "no sleep, no communication",
    "ddp": "DDP",
    "ours": "ours, FullSync",
    "backup": "ours, BackupSync(6, 2)",
    "finish": 'ours, BackupSync(6, 2, late="finish")',
}
_LOOK_S = 0.001


@dataclass(frozen=True)
class Straggle:
    """One run of one contender in one world."""

    contender: str
    case: str  # "b" or "c"
    size: str
    quorum: int
    backups: int
    iterations: int  # updates that are timed
    warmup: int

    @property
    def steps(self) -> int:
        return self.warmup + self.iterations


def run(given: Straggle) -> dict[str, Any]:
    """Take part in a run, with torchrun's variables set; gives this host's side of the clock."""
    torch.set_num_threads(1)
    torch.manual_seed(workload.SEED)
    dist.init_process_group("gloo")
    try:
        if given.contender in ("comm", "none"):
            return _without_sleep(given)
        return _ddp(given) if given.contender == "ddp" else _ours(given)
    finally:
        dist.destroy_process_group()


def _without_sleep(given: Straggle) -> dict[str, Any]:
    flat = torch.zeros(workload.parameter_bytes(given.size) // 4)
    net = workload.model(given.size)
    optimizer = workload.optimizer(net)
    x, y = workload.batches(given.size, dist.get_rank())
    versions = _Versions(given)
    dist.barrier()
    for i in range(given.steps):
        if given.contender == "comm":
            dist.all_reduce(flat)
        else:
            optimizer.zero_grad()
            torch.autograd.backward(workload.loss(net, x[i % len(x)], y[i % len(x)]))
            optimizer.step()
        versions.reached(i + 1)
    return versions.result()


def _ddp(given: Straggle) -> dict[str, Any]:
    net = workload.model(given.size)
    model = DistributedDataParallel(net)
    optimizer = workload.optimizer(net)
    sleeps = workload.sleeps(given.case, dist.get_rank(), given.steps).tolist()
    x, y = workload.batches(given.size, dist.get_rank())
    versions = _Versions(given)
    loss = torch.zeros(())
    dist.barrier()
    for i in range(given.steps):
        time.sleep(sleeps[i])
        loss = workload.loss(model, x[i % len(x)], y[i % len(x)])
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        versions.reached(i + 1)
    return {**versions.result(), "loss": loss.item(), "weights": _weights(net)}


def _ours(given: Straggle) -> dict[str, Any]:
    import quorate  # late: DDP needs torch alone

    net = workload.model(given.size)
    optimizer = workload.optimizer(net)
    policy: quorate.Policy = quorate.FullSync()
    if given.contender != "ours":
        late = "finish" if given.contender == "finish" else "cancel"
        policy = quorate.BackupSync(given.quorum, given.backups, late=late)
    model = quorate.DataParallel(net, optimizer, policy)
    # Finished late work may need more draws than there are versions: never, since each takes part in one at most.
    sleeps = workload.sleeps(given.case, dist.get_rank(), given.steps + 1).tolist()
    x, y = workload.batches(given.size, dist.get_rank())
    versions = _Versions(given)
    loss = torch.zeros(())
    used = dropped = own = 0
    dist.barrier()
    while model.version < given.steps:
        draw = own if given.contender == "finish" else model.version
        own += 1
        is_done = False
        with model.iteration():
            due = time.monotonic() + sleeps[draw]
            while time.monotonic() < due and (given.contender == "finish" or not model.late):
                time.sleep(max(0.0, min(_LOOK_S, due - time.monotonic())))
            loss = workload.loss(model, x[draw % len(x)], y[draw % len(x)])
            torch.autograd.backward(loss)
            optimizer.step()
            assert model.receipt is not None
            is_done = model.receipt.applied
            if model.receipt.over:
                break
        optimizer.zero_grad()
        used, dropped = used + is_done, dropped + (not is_done)
        versions.reached(model.version)
    model.synchronize()
    found = {**versions.result(), "loss": loss.item(), "weights": _weights(net), "used": used, "dropped": dropped}
    model.finish()
    return found


def _weights(net: nn.Module) -> float:
    return sum(float(parameter.detach().double().abs().sum()) for parameter in net.parameters())


class _Versions:
    """When this host first had the version that ends the warm-up, and the last one."""

    def __init__(self, given: Straggle) -> None:
        self._given = given
        self._at_s: dict[int, float] = {}

    def reached(self, version: int) -> None:
        for wanted in (self._given.warmup, self._given.steps):
            if version >= wanted and wanted not in self._at_s:
                self._at_s[wanted] = time.monotonic()

    def result(self) -> dict[str, Any]:
        never = float("inf")
        return {
            "start_s": self._at_s.get(self._given.warmup, never),
            "end_s": self._at_s.get(self._given.steps, never),
            "cpu_s": time.process_time(),
        }
