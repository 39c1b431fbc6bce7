"""Some processes wait in a collective, and the others for a quorum or an update: `stalled.py POLICY`. It never ends."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import quorate
from tests.data_parallel.scripts.meeting import meet, say


def main() -> None:
    worker, workers = meet()
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_, **__: say(f"warned: {message}")  # type: ignore[assignment]
    policies: dict[str, Any] = {"backup": quorate.BackupSync(workers - 1, 1), "full": quorate.FullSync()}
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = quorate.DataParallel(net, optimizer, policies[sys.argv[1]], patience_s=3.0)
    for number in range(12):
        if number == (9 if worker == 2 else 4):
            say("collective")
            dist.barrier()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
