"""Trains with `quorate.Sampler` and collectives of its own after every pass: `passes.py FOLDER [case …]`.

Every process writes FOLDER/passes<worker>.json: by case and pass, the version and the samples that it saw applied.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quorate
from tests.data_parallel.scripts.meeting import meet, say

SAMPLES, BATCH, PASSES = 54, 4, 3


def look_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """As Accelerate does: the next batch is loaded before the last one is handed out."""
    batches = iter(loader)
    here = next(batches, None)
    while here is not None:
        following = next(batches, None)
        yield here
        here = following


def train(worker: int, workers: int, policy: quorate.Policy, **options: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sampler = quorate.Sampler(SAMPLES, BATCH, accumulate=options.get("accumulate", 1), seed=1)
    model = quorate.DataParallel(net, optimizer, policy, sampler=sampler)
    data = TensorDataset(torch.randn(SAMPLES, 4), torch.arange(SAMPLES))
    loading = options.get("loading", {})
    loader = DataLoader(data, batch_sampler=sampler, **loading)
    seen = []
    applied: list[int] = []
    leaves = options.get("leaves", 0)
    while len(seen) < PASSES:
        computed = 0
        numbers: list[int] = []
        for x, which in look_ahead(loader) if options.get("ahead") else loader:
            numbers += which.tolist()
            computed += 1
            if worker == options.get("slow"):
                time.sleep(0.01)
            loss: Tensor = model(x).square().mean()
            loss.backward()
            if computed % sampler.accumulate:
                continue
            receipt: Any = optimizer.step()
            optimizer.zero_grad()
            assert receipt.version == model.version
            applied += numbers if receipt.applied else []
            numbers = []
            if computed == leaves:
                break
        else:
            leaves = -1
        if leaves > 0:  # the rest of the pass comes next
            leaves = 0
            model.meet()
            dist.barrier()
            model.check_identical()
            continue
        leaves = options.get("leaves", 0)
        versions = [torch.zeros((), dtype=torch.int64) for _ in range(workers)]
        dist.all_gather(versions, torch.tensor(model.version))
        dist.barrier()
        digest = model.check_identical()
        with torch.no_grad():
            evaluated = float(model.eval()(data.tensors[0]).sum())
        model.train()
        told = [int(one) for one in versions]
        seen.append({"versions": told, "digest": digest, "evaluated": evaluated, "applied": applied})
        applied = []
    model.finish()
    return seen


def cases(workers: int) -> Iterator[tuple[str, quorate.Policy, dict[str, Any]]]:
    backup = quorate.BackupSync(workers - 1, 1)
    two = {"num_workers": 2}
    yield "plain", backup, {}
    yield "slow", backup, {"slow": 1}
    yield "one-loading", backup, {"loading": {"num_workers": 1}}
    yield "two-loading", backup, {"loading": two}
    yield "two-loading-slow", backup, {"loading": two, "slow": 1}
    yield "persistent", backup, {"loading": {**two, "persistent_workers": True, "prefetch_factor": 4}, "slow": 0}
    yield "ahead", backup, {"ahead": True}
    yield "ahead-slow", backup, {"ahead": True, "slow": 1}
    yield "ahead-loading", backup, {"ahead": True, "loading": two, "slow": 1}
    yield "accumulate", backup, {"accumulate": 2, "loading": two, "slow": 1}
    yield "leaves", backup, {"leaves": 2, "slow": 1}
    yield "leaves-loading", backup, {"leaves": 2, "loading": {**two, "persistent_workers": True}, "slow": 1}
    yield "leaves-full", quorate.FullSync(), {"leaves": 2, "loading": two, "slow": 1}
    yield "finish", quorate.BackupSync(workers - 1, 1, late="finish"), {"loading": two, "slow": 1}
    yield "first", quorate.BackupSync(1, workers - 1), {"loading": two, "slow": 1}
    yield "all", quorate.BackupSync(workers, 0), {"loading": two}
    yield "deadline", quorate.Deadline(limit=0.005, min_quorum=1), {"loading": two, "slow": 1}
    yield "adaptive", quorate.AdaptiveBackup(), {"loading": two, "slow": 1}
    yield "full", quorate.FullSync(), {"loading": two}
    yield "full-plain", quorate.FullSync(), {}
    yield "delayed", quorate.Delayed(2), {"ahead": True}
    yield "delayed-loading", quorate.Delayed(1), {"loading": two, "slow": 1}


def main() -> None:
    worker, workers = meet()
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    seen = {}
    for name, policy, options in cases(workers):
        if not only or name in only:
            say(f"case {name}")
            seen[name] = train(worker, workers, policy, **options)
            gc.collect()  # a process group that a loading process collects would end it
    (folder / f"passes{worker}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
