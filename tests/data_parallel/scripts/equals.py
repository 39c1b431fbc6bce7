"""Trains the same net with DDP, or with a plain loop, and with quorate: `equals.py FOLDER`.

Worker 0 writes FOLDER/differences.json: by case, how far the parameters of each process are from what they should be.
The nets are of doubles, so that only what is really different differs.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import quorate
from tests.data_parallel.scripts.meeting import meet, say

UPDATES, FEWER = 100, 30


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.middle, self.last = nn.Linear(64, 12), nn.Linear(12, 3)
        self.sometimes, self.never = nn.Linear(64, 12), nn.Linear(3, 3)

    def forward(self, x: Tensor, detour: bool = False) -> Tensor:
        flat = torch.tanh(self.norm(self.convolution(x))).flatten(1)
        hidden = self.middle(flat) + (self.sometimes(flat) if detour else 0)
        out: Tensor = self.last(torch.tanh(hidden))
        return out


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.003)


def batch(worker: int, number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10_000 * worker + number)
    return torch.randn(4, 2, 4, 4, generator=draw, dtype=torch.float64), torch.randint(0, 3, (4,), generator=draw)


def loss_of(model: nn.Module, worker: int, number: int, unused: bool = False) -> Tensor:
    x, y = batch(worker, number)
    return nn.functional.cross_entropy(model(x, unused and number % 4 == worker), y)


def train(
    ours: bool,
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    accumulate: int = 1,
    clip: float | None = None,
    clips_itself: bool = False,
    schedule: bool = False,
    unused: bool = True,
    norm: bool = False,
    set_to_none: bool = True,
    updates: int = FEWER,
    **options: Any,
) -> list[Tensor]:
    worker = dist.get_rank()
    torch.manual_seed(worker)  # worker 0's parameters count
    net = Net(norm).double()
    model: Any
    if ours:
        optimizer = make(net.parameters())
        model = quorate.DataParallel(net, optimizer, clip_norm=clip if clips_itself else None, **options)
    else:
        model = DistributedDataParallel(net, find_unused_parameters=True)
        optimizer = make(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.8) if schedule else None
    for update in range(updates):
        for part in range(accumulate):
            with model.no_sync() if part < accumulate - 1 else nullcontext():
                (loss_of(model, worker, update * accumulate + part, unused) / accumulate).backward()
        if clip is not None and not (ours and clips_itself):
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        receipt: Any = optimizer.step()
        assert not ours or (receipt.applied and receipt.version == update + 1), receipt
        optimizer.zero_grad(set_to_none=set_to_none)
        if scheduler is not None:
            scheduler.step()
    if ours:
        model.check_identical()
        model.finish()
    return [one.detach().clone() for one in net.parameters()]


def delayed(policy: quorate.Delayed) -> tuple[list[Tensor], list[Tensor]]:
    """What a plain loop gives that has everybody's batches, and what we give."""
    worker, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net().double()
    optimizer = sgd(net.parameters())
    waiting: deque[tuple[Tensor | None, ...]] = deque()

    def apply() -> None:
        for parameter, gradient in zip(net.parameters(), waiting.popleft(), strict=True):
            parameter.grad = gradient
        optimizer.step()

    for iteration in range(FEWER):
        # The mean of the losses has the mean of the gradients.
        loss = torch.stack([loss_of(net, other, iteration) for other in range(workers)]).mean()
        waiting.append(torch.autograd.grad(loss, list(net.parameters()), allow_unused=True))
        while len(waiting) > policy.delay_at(iteration + 1):
            apply()
    while waiting:
        apply()

    torch.manual_seed(worker)
    mine = Net().double()
    optimizer = sgd(mine.parameters())
    model = quorate.DataParallel(mine, optimizer, policy)
    for iteration in range(FEWER):
        loss_of(model, worker, iteration).backward()
        receipt: Any = optimizer.step()
        assert receipt.staleness == policy.delay_at(iteration + 1), (iteration, receipt)
        assert receipt.version == iteration + 1 - receipt.staleness, (iteration, receipt)
        optimizer.zero_grad()
    model.finish()
    assert model.version == FEWER
    return [one.detach() for one in net.parameters()], [one.detach() for one in mine.parameters()]


CASES: dict[str, dict[str, Any]] = {
    "sgd": {"make": sgd, "updates": UPDATES},
    "adamw": {"make": adamw, "updates": UPDATES},
    "sgd, accumulation": {"make": sgd, "accumulate": 3},
    "adamw, clipping": {"make": adamw, "clip": 0.3},
    "sgd, accumulation and clipping": {"make": sgd, "updates": UPDATES, "accumulate": 2, "clip": 0.3},
    "adamw, accumulation and clipping": {"make": adamw, "updates": UPDATES, "accumulate": 2, "clip": 0.3},
    "sgd, clip_norm": {"make": sgd, "clip": 0.3, "clips_itself": True},
    "sgd, schedule": {"make": sgd, "schedule": True},
    "sgd, batch norm": {"make": sgd, "norm": True, "unused": False},
    "sgd, buckets of 1 kB": {"make": sgd, "bucket_bytes": 1000, "schedule": True},
    "adamw, buckets of 1 kB and clipping": {"make": adamw, "bucket_bytes": 1000, "clip": 0.3, "accumulate": 2},
    "sgd, gradients set to zero": {"make": sgd, "set_to_none": False, "unused": False},
    "sgd, without overlap": {"make": sgd, "overlap": False},
}
DELAYS = {
    "delay 0": lambda: quorate.Delayed(0),
    "delay 1": lambda: quorate.Delayed(1),
    "delay 2": lambda: quorate.Delayed(2),
    "delay 3": lambda: quorate.Delayed(3),
    "delay 3, warming up": lambda: quorate.Delayed(3, warm_up=20),
}
_OURS_ONLY = ("clips_itself", "bucket_bytes", "overlap")


def main() -> None:
    worker, workers = meet()
    differences: dict[str, list[float]] = {}

    def compare(name: str, expected: list[Tensor], found: list[Tensor]) -> None:
        worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(expected, found, strict=True))
        everybody = torch.zeros(workers, dtype=torch.float64)
        everybody[worker] = worst
        dist.all_reduce(everybody)
        differences[name] = everybody.tolist()

    references: dict[str, list[Tensor]] = {}
    for name, options in CASES.items():
        theirs = {key: value for key, value in options.items() if key not in _OURS_ONLY}
        key = repr(sorted((one, str(value)) for one, value in theirs.items()))
        if key not in references:
            say(f"DDP: {name}")
            references[key] = train(False, **theirs)
        say(f"ours: {name}")
        compare(name, references[key], train(True, **options))
    for name, make in DELAYS.items():
        compare(name, *delayed(make()))
    if worker == 0:
        (Path(sys.argv[1]) / "differences.json").write_text(json.dumps(differences))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
