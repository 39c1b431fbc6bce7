"""Runs one training script under every policy in the same processes, and writes what each process saw.

A script is a function of a `Case`: it trains as DDP scripts do, with the lines changed that the guide names. The
measures it returns go to FOLDER/RANK.json, by the name of the case.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import quorate
from quorate.data_parallel.process_group import ProcessGroup

WORKERS = 3
SLOW_S = 0.03  # a slow process sleeps so long in every iteration
QUORUM = 2


@dataclass(frozen=True)
class Case:
    """What differs between two runs of a script.

    policy: None for DistributedDataParallel.
    slow: whether the last process is slow.
    samples: whether the batches come from `quorate.Sampler`, not from DistributedSampler.
    """

    name: str
    policy: Callable[[], quorate.Policy] | None
    slow: bool = False
    samples: bool = False

    @property
    def is_ddp(self) -> bool:
        return self.policy is None

    @property
    def is_quorum(self) -> bool:
        return self.name.startswith("backup")

    def dawdle(self) -> None:
        """Where the script loads or augments its batch."""
        if self.slow and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(SLOW_S)


def backup() -> quorate.Policy:
    return quorate.BackupSync(QUORUM, WORKERS - QUORUM)


CASES = [
    Case("ddp", None),
    Case("full", quorate.FullSync),
    Case("full with samples", quorate.FullSync, samples=True),
    Case("delayed", lambda: quorate.Delayed(1), samples=True),
    Case("backup", backup, samples=True),
    Case("backup and a slow process", backup, slow=True, samples=True),
]
NAMES = [case.name for case in CASES]


class Traffic:
    """Elements that this process gave to quorate's all-reduces."""

    def __init__(self) -> None:
        self.elements = 0
        plain = ProcessGroup.allreduce

        def counted(processes: ProcessGroup, tensors: list[Any]) -> Any:
            self.elements += sum(tensor.numel() for tensor in tensors)
            return plain(processes, tensors)

        ProcessGroup.allreduce = counted  # type: ignore[method-assign]


def values(net: nn.Module) -> list[float]:
    """All parameters of a net, to be compared."""
    return torch.cat([one.detach().float().reshape(-1) for one in net.parameters()]).tolist()


def same_everywhere(net: nn.Module) -> bool:
    """Whether every process has the same parameters and buffers: a collective of the script's own."""
    mine = torch.cat([one.detach().double().reshape(-1) for one in net.state_dict().values()])
    largest, smallest = mine.clone(), mine.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return torch.equal(largest, smallest)


def run(script: Callable[[Case, Path], dict[str, Any]], cases: list[Case] = CASES) -> None:
    """Train in every case, in one start of the processes: `torchrun … script.py FOLDER [CASE …]`."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or [case.name for case in cases]
    seen: dict[str, Any] = {}
    for case in (case for case in cases if case.name in names):
        began = time.perf_counter()
        torch.manual_seed(0)
        seen[case.name] = script(case, folder)
        seen[case.name]["seconds"] = time.perf_counter() - began
        print(f"{case.name}: {seen[case.name]['seconds']:.1f} s", flush=True)  # noqa: T201 - for whoever waits
    rank = dist.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(seen))
