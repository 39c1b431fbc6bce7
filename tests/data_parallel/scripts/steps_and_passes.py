"""Loops over `model.steps` that draw from a `quorate.Sampler`, pass after pass: `steps_and_passes.py FOLDER [case …]`.

Every process writes FOLDER/steps<worker>.json: by case, what its collectives gathered and which samples were applied.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate
from tests.data_parallel.scripts.loops import gathered
from tests.data_parallel.scripts.meeting import meet, say

SAMPLES, BATCH, STEPS, EVERY = 54, 4, 42, 7  # under full sync one process has no batch for version 14


def again_and_again(loader: DataLoader[Any]) -> Iterator[Any]:
    """Batches without end, as scripts that count write it; a pass without a batch would end it."""
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        yield batch


def train(worker: int, workers: int, policy: quorate.Policy, loading: int, chained: bool, early: bool) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sampler = quorate.Sampler(SAMPLES, BATCH, seed=1)
    model = quorate.DataParallel(net, optimizer, policy, sampler=sampler)
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES))
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=sampler, num_workers=loading)
    met, applied = [], []

    def iterate(x: Any, which: Any) -> None:
        if worker == 1:
            time.sleep(0.01)
        model(x).square().mean().backward()
        receipt: Any = optimizer.step()
        optimizer.zero_grad()
        applied.extend(which.tolist() if receipt.applied else [])

    if chained:
        batches = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    else:
        batches = again_and_again(loader)
    begun = [next(batches)] if early else []  # a loader that is asked before the loop begins
    for step in model.steps(STEPS, meet_every=EVERY):
        if step % EVERY == 0:
            met.append([*gathered(step, workers), *gathered(model.version, workers)])
            model.check_identical()
        iterate(*(begun.pop() if begun else next(batches)))
    met.append([*gathered(model.version, workers)] * 2)
    counted, applied = applied, []
    ended = []
    for _ in range(2):  # the rest of the epoch, then a whole one; a pass ends in a meeting again
        del batches
        batches = iter(loader)
        for x, which in batches:
            iterate(x, which)
        ended.append(gathered(model.version, workers))
        model.check_identical()
        counted, applied, last = counted + applied, [], applied
    refused = ""
    try:
        if policy.takes_everybody:
            next(model.steps(1000, meet_every=1))
    except quorate.BadInput as error:
        refused = str(error)
    model.finish()
    return {"refused": refused, "met": met, "applied": counted, "last": last, "ended": ended}


def cases(workers: int) -> Iterator[tuple[str, quorate.Policy, int, bool, bool]]:
    backup = quorate.BackupSync(workers - 1, 1)
    yield "plain", backup, 0, False, False
    yield "chained", backup, 0, True, False
    yield "loading", backup, 2, True, False
    yield "early", backup, 2, False, True
    yield "first", quorate.BackupSync(1, workers - 1), 0, False, False
    yield "all", quorate.BackupSync(workers, 0), 0, False, False
    yield "finish", quorate.BackupSync(workers - 1, 1, late="finish"), 0, False, False
    yield "deadline", quorate.Deadline(limit=0.005, min_quorum=1), 0, False, True
    yield "full", quorate.FullSync(), 0, False, False


def main() -> None:
    worker, workers = meet()
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    seen = {}
    for name, *case in cases(workers):
        if not only or name in only:
            say(f"case {name}")
            seen[name] = train(worker, workers, *case)
            gc.collect()  # a process group that a loading process collects would end it
    (folder / f"steps{worker}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
