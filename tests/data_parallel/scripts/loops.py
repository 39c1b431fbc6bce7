"""Loops that count, samplers that are not quorate's, and wrappers that do not fit: `loops.py FOLDER`.

Every process writes FOLDER/loops<worker>.json.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import quorate
from tests.data_parallel.scripts.meeting import meet

STEPS, EVERY = 30, 10


def wrapped(policy: quorate.Policy, **options: Any) -> tuple[quorate.DataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return quorate.DataParallel(net, optimizer, policy, **options), optimizer


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, slow: bool) -> Any:
    if slow:
        time.sleep(0.01)
    model(torch.randn(3, 4)).square().mean().backward()
    receipt = optimizer.step()
    optimizer.zero_grad()
    return receipt


def gathered(number: int, workers: int) -> list[int]:
    found = [torch.zeros((), dtype=torch.int64) for _ in range(workers)]
    dist.all_gather(found, torch.tensor(number))
    return [int(one) for one in found]


def counting(worker: int, workers: int, policy: quorate.Policy) -> dict[str, Any]:
    """A loop over `model.steps`, with a collective at every tenth version."""
    model, optimizer = wrapped(policy)
    numbers, met, digests = [], [], []
    for step in model.steps(STEPS, meet_every=EVERY):
        numbers.append(step)
        if step % EVERY == 0:
            met.append(gathered(step, workers))
            digests.append(model.check_identical())
        read = step if policy.name == "delayed" else model.version
        assert read == step
        iterate(model, optimizer, slow=worker == 1)
    met.append(gathered(model.version, workers))
    again = list(model.steps(STEPS))
    model.finish()
    return {"numbers": numbers, "met": met, "digests": digests, "again": again, "version": model.version}


def losing(worker: int, workers: int) -> dict[str, Any]:
    """A DistributedSampler under a quorum, and a meeting after each epoch."""
    model, optimizer = wrapped(quorate.BackupSync(workers - 1, 1), out=Path(sys.argv[1]) / "losing")
    data = TensorDataset(torch.randn(60, 4))
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    lost, versions = 0, []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for _ in loader:
                lost += iterate(model, optimizer, slow=worker == 1).lost_samples
            model.meet()
            versions.append(gathered(model.version, workers))
        model.finish()
        model.meet()
    trace = str(Path(sys.argv[1]) / "losing" / "trace.jsonl")
    return {"trace": trace, "lost": lost, "versions": versions, "said": [str(one.message) for one in said]}


def meeting_often(policy: quorate.Policy) -> dict[str, Any]:
    """A meeting after every iteration: who leaves one early must not be taken for one that has yet to come."""
    model, optimizer = wrapped(policy)
    versions = []
    for number in range(150):
        optimizer.param_groups[0]["lr"] = 0.01 / (number + 1)  # a gradient that is left out would be noticed
        iterate(model, optimizer, slow=False)
        for _ in range(1 + number % 2):
            model.meet()
        versions.append(model.version)
    model.finish()
    return {"versions": versions}


def running_on(worker: int, workers: int) -> dict[str, Any]:
    """A loop of its own that counts, and goes on when the others have ended."""
    model, optimizer = wrapped(quorate.BackupSync(workers - 1, 1))
    over = 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(10 if worker else 40):
            receipt = iterate(model, optimizer, slow=False)
            over += receipt.over
        steps = list(model.steps(1000)) if over else []
        model.finish()
    return {"over": over, "steps": steps, "said": [str(one.message) for one in said]}


def refusals() -> list[str]:
    model, optimizer = wrapped(quorate.FullSync())
    found = []
    for wrong in (
        lambda: DistributedDataParallel(model),
        lambda: quorate.DataParallel(model, optimizer),
        lambda: quorate.DataParallel(DistributedDataParallel(nn.Linear(4, 2)), optimizer),
        lambda: list(model.steps(-1)),
        lambda: list(model.steps(3, meet_every=0)),
    ):
        try:
            wrong()
        except quorate.BadInput as error:
            found.append(str(error))
    model.finish()
    return found


def main() -> None:
    worker, workers = meet()
    policies = {
        "backup": quorate.BackupSync(workers - 1, 1),
        "finish": quorate.BackupSync(workers - 1, 1, late="finish"),
        "deadline": quorate.Deadline(limit=0.005, min_quorum=1),
        "full": quorate.FullSync(),
        "delayed": quorate.Delayed(2),
    }
    seen: dict[str, Any] = {name: counting(worker, workers, policy) for name, policy in policies.items()}
    seen |= {"losing": losing(worker, workers), "running on": running_on(worker, workers), "refusals": refusals()}
    seen |= {f"often, {one.name}": meeting_often(one) for one in (quorate.FullSync(), quorate.Delayed(1))}
    (Path(sys.argv[1]) / f"loops{worker}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
