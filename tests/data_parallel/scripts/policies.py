"""Trains under every policy that DataParallel takes, on batches that divide among the processes and on others.

`policies.py FOLDER`: every process writes FOLDER/<worker>.json: by case, which samples it used in which epoch, and at
which version it ended. Strangers send nonsense to worker 0 meanwhile. After `finish()` parameters and buffers of all
processes are compared.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate
from quorate.data_parallel.process_group import ProcessGroup
from tests.data_parallel.scripts.meeting import meet, say

BATCH, EPOCHS, ITERATIONS = 4, 2, 5

HOSTILE = [b'{"kind":"hello","worker":1,"token":"\\ud800"}', b"{" * 4000, b'{"kind":"lost","why":"I say so"}', b""]

#: By name, a policy for so many processes.
POLICIES: dict[str, Callable[[int], quorate.Policy]] = {
    "full": lambda workers: quorate.FullSync(),
    "delayed 0": lambda workers: quorate.Delayed(0),
    "delayed 1": lambda workers: quorate.Delayed(1),
    "delayed 3, warming up": lambda workers: quorate.Delayed(3, warm_up=4),
    "backup 0": lambda workers: quorate.BackupSync(workers, 0),
    "backup 1": lambda workers: quorate.BackupSync(workers - 1, 1),
    "backup 1, late work finished": lambda workers: quorate.BackupSync(workers - 1, 1, late="finish"),
    "deadline": lambda workers: quorate.Deadline(limit=0.02, min_quorum=1),
    "adaptive": lambda workers: quorate.AdaptiveBackup(),
}

#: Where the same gradients are in a version whatever happens when.
SAME_BITS = ("full", "delayed 1", "backup 0")


def samples_for(workers: int) -> dict[str, int]:
    """By name, how many samples an epoch has: as many batches for everybody, or one more of which half is missing."""
    return {"even": 3 * workers * BATCH, "uneven": (3 * workers + 1) * BATCH - BATCH // 2}


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))


def disturb(model: quorate.DataParallel) -> None:
    """What strangers send to worker 0's port disturbs nobody."""
    hub = model._control._hub
    for said in () if hub is None else HOSTILE:
        with socket.create_connection(("127.0.0.1", hub._address.port)) as stranger:
            stranger.sendall(struct.pack(">I", len(said)) + said)


class Trained:
    """One model of this process, and what became of its batches."""

    def __init__(self, policy: quorate.Policy, sampler: quorate.Sampler | None = None) -> None:
        module = net()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.model = quorate.DataParallel(module, self.optimizer, policy, sampler=sampler, patience_s=30.0)
        disturb(self.model)

    def step(self, x: torch.Tensor) -> Any:
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        receipt: Any = self.optimizer.step()
        return receipt

    def finish(self) -> int:
        self.model.finish()
        self.model.check_identical()
        return self.model.version


def with_sampler(policy: quorate.Policy, samples: int) -> dict[str, Any]:
    """Passes over a data set; the learning rate changes after each."""
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(samples, 5, generator=draw), torch.arange(samples))
    sampler = quorate.Sampler(data, batch_size=BATCH)
    trained = Trained(policy, sampler)
    used: list[int] = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, numbers in DataLoader(data, batch_sampler=sampler):
            if trained.step(x).applied:
                used += numbers.tolist()
        trained.scheduler.step()
    return {"used": used, "version": trained.finish()}


def without_sampler(policy: quorate.Policy, iterations: int) -> dict[str, Any]:
    """So many iterations of one's own, unless the others have ended before."""
    trained = Trained(policy)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for number in range(iterations):
        if trained.step(torch.randn(BATCH, 5, generator=draw)).over:
            break
        if number == 2 and isinstance(policy, quorate.FullSync | quorate.Delayed):
            trained.model.check_identical()  # while updates are under way
    if dist.get_rank() == 0:
        trained.model(torch.randn(BATCH, 5, generator=draw))  # changes buffers, but no update follows
    return {"version": trained.finish()}


def bits(policy: quorate.Policy, contention: float) -> str:
    """The digest after some updates of a net of several buckets, on a machine that is this busy, it seems."""
    ProcessGroup.contention = lambda self: contention  # type: ignore[method-assign]
    torch.manual_seed(7)
    module = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 192), nn.BatchNorm1d(192), nn.Linear(192, 3))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    model = quorate.DataParallel(module, optimizer, policy, clip_norm=1.0)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        model(torch.randn(8, 64, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.finish()
    assert len(model._plane.layout.buckets) > 2 or policy.history
    return model.check_identical()


def main() -> None:
    worker, workers = meet()
    found: dict[str, dict[str, Any]] = {}
    for name, make in POLICIES.items():
        for kind, samples in samples_for(workers).items():
            say(f"{name}, {kind}")
            found[f"{name}, {kind}"] = with_sampler(make(workers), samples)
        for kind, iterations in {"own even": ITERATIONS, "own uneven": ITERATIONS + worker}.items():
            say(f"{name}, {kind}")
            found[f"{name}, {kind}"] = without_sampler(make(workers), iterations)
    for name, make in POLICIES.items():
        if name in SAME_BITS:
            found[f"{name}, bits"] = {"digests": [bits(make(workers), busy) for busy in (0.0, 1.0, 0.0)]}
    (Path(sys.argv[1]) / f"{worker}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
