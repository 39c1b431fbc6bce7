"""A training script in which a process dies: `torchrun … elastic.py FOLDER --dies WORKER …`.

Every process draws its own batches and its own dropout, so the final parameters tell whether anything was lost. What
happens is noted in FOLDER; with --reference the same is then trained once more, without a death.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import quorate

UPDATES, DIES_AT = 12, 7
POLICIES: dict[str, Callable[[], quorate.Policy]] = {
    "full": quorate.FullSync,
    "delayed": lambda: quorate.Delayed(2),
    "backup": lambda: quorate.BackupSync(2, 1),
}
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dies", type=int, default=-1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--policy", choices=POLICIES, default="full")
    parser.add_argument("--disks", action="store_true", help="each process has a folder of its own")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--store", help="a file to meet in, without torchrun")
    given = parser.parse_args()
    torch.set_num_threads(1)
    start(given.store)
    train(given, "run", given.dies)
    if given.reference:
        train(given, "whole", -1)
    dist.destroy_process_group()


def start(meeting: str | None) -> None:
    if meeting is None:
        dist.init_process_group("gloo")
    else:
        rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store: Any = dist.FileStore(meeting, workers)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)


def train(given: argparse.Namespace, name: str, dies: int) -> None:
    worker = dist.get_rank()
    torch.manual_seed(worker)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], 0.5)
    model = quorate.DataParallel(
        net,
        optimizer,
        POLICIES[given.policy](),
        checkpoint=given.folder / (f"{name}{worker}" if given.disks else name),
        checkpoint_every=given.every,
        also={"scheduler": scheduler},
    )

    def note(what: str, **more: Any) -> None:
        with (given.folder / f"notes{worker}.jsonl").open("a") as file:
            line = {"run": name, "life": LIFE, "what": what, "version": model.version, **more}
            file.write(json.dumps(line) + "\n")

    note("begins")
    while model.version < UPDATES:
        loss = model(torch.randn(8, 6)).square().mean()
        loss.backward()
        receipt = optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if receipt.over:
            break
        if LIFE == 0 and worker == dies and model.version >= DIES_AT:
            model.synchronize()  # step() may return before its update is made
            note("dies")
            os.kill(os.getpid(), signal.SIGKILL)
    model.finish()
    note("ends", digest=model.digest(), lr=optimizer.param_groups[0]["lr"])


if __name__ == "__main__":
    main()
