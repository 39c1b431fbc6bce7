"""Trains until something happens to a process: `dying.py FOLDER POLICY WHERE`.

The process that WHERE is about (worker 1, or the one given as WHERE:WORKER) says "here" and stays there, or does what
it is to do itself; a test then kills it, stops it, or only looks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import quorate
from tests.data_parallel.scripts.meeting import meet, say

POLICIES = {
    "full": quorate.FullSync(),
    "delayed": quorate.Delayed(2),
    "backup": quorate.BackupSync(2, 1),
    "all": quorate.BackupSync(3, 0),
}
AT = 5  # the iteration in which it happens


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.happens: Any = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.happens is not None:
            self.happens()
        out: Tensor = self.last(hidden)
        return out


def stay() -> None:
    say("here")
    time.sleep(300)


def main() -> None:
    where, _, who = sys.argv[3].partition(":")
    worker, _ = meet()
    patience_s = float(os.environ.get("PATIENCE_S", "30"))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = quorate.DataParallel(net, optimizer, POLICIES[sys.argv[2]], patience_s=patience_s)
    say("wrapped")
    is_the_one = worker == int(who or 1)
    for iteration in range(10**6):
        happens = is_the_one and iteration == AT
        if happens and where == "forward":
            net.happens = stay
        loss = model(torch.randn(3, 4)).square().mean()
        if happens and where == "raise":
            raise ValueError("a bug in the script")
        if happens and where == "exit":
            sys.exit(3)
        loss.backward()
        if happens and where == "step":  # dies with its gradient on the way: others may or may not have it
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if iteration == AT:
            say("training")


if __name__ == "__main__":
    main()
