"""Trains a model, drops it, and looks at what is left of its memory: `memory.py FOLDER`.

Every process writes FOLDER/<worker>.json: by case, how many bytes stayed, in units of the parameters, and whether a
parameter is still there. The garbage collector is off. A parameter is larger than what malloc keeps for later.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import quorate
from tests.data_parallel.scripts.meeting import meet, say

WIDTH, SAMPLES = 3000, 8  # 36 MB
Wrap = Callable[[nn.Module, torch.optim.Optimizer], nn.Module]

POLICIES: dict[str, Callable[[int], quorate.Policy]] = {
    "full": lambda workers: quorate.FullSync(),
    "delayed": lambda workers: quorate.Delayed(1),
    "backup": lambda workers: quorate.BackupSync(workers - 1, 1),
}
STYLES = ("zero_grad at the start", "zero_grad at the end", "without finish", "with a sampler", "with a schedule")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def train(policy: quorate.Policy | None, style: str) -> weakref.ref[Any]:
    """Some iterations; gives a weak reference to a parameter of the model, which goes out of scope."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sampler = quorate.Sampler(4 * SAMPLES, SAMPLES) if style == "with a sampler" else None
    model: Any = (
        DistributedDataParallel(net)
        if policy is None
        else quorate.DataParallel(net, optimizer, policy, sampler=sampler)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2) if style == "with a schedule" else None
    batches = DataLoader(range(4 * SAMPLES), batch_sampler=sampler) if sampler is not None else range(3)
    for _ in batches:
        if style != "zero_grad at the end":
            optimizer.zero_grad()
        model(torch.randn(SAMPLES, WIDTH)).square().mean().backward()
        optimizer.step()
        if style == "zero_grad at the end":
            optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    if policy is not None and style != "without finish":
        model.finish()
        if style == "zero_grad at the start" and not isinstance(policy, quorate.Delayed):
            assert bool(net[0].weight.grad[0].isfinite().all()), "a gradient can be read after the end"
    return weakref.ref(net[0].weight)


def main() -> None:
    worker, workers = meet()
    folder = Path(sys.argv[1])
    found: dict[str, tuple[float, bool]] = {}
    cases: dict[str, quorate.Policy | None] = {"ddp": None, **{name: make(workers) for name, make in POLICIES.items()}}
    for policy in cases.values():
        train(policy, "zero_grad at the end")  # imports and threads that stay
    gc.collect()
    gc.disable()
    for name, policy in cases.items():
        for style in STYLES if policy is not None else STYLES[:2]:
            say(f"{name}, {style}")
            before = resident_bytes()
            left = train(policy, style)
            after = resident_bytes()
            found[f"{name}, {style}"] = (after - before) / (4 * WIDTH * WIDTH), left() is not None
            dist.barrier()
    (folder / f"{worker}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
