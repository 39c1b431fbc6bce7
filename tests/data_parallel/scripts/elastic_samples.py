"""Two epochs with `quorate.Sampler`, in which process 1 dies: `torchrun … elastic_samples.py FOLDER --policy NAME`.

Every applied batch is noted in FOLDER, with the version that it is part of.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate

SAMPLES, EPOCHS, DIES_AT = 90, 2, 4
POLICIES = {"full": quorate.FullSync, "backup": lambda: quorate.BackupSync(2, 1)}
LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--policy", choices=POLICIES, default="full")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.arange(SAMPLES))
    sampler = quorate.Sampler(data, 5)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    policy: Any = POLICIES[given.policy]()
    model = quorate.DataParallel(net, optimizer, policy, sampler=sampler, checkpoint=given.folder / "run")

    def note(**line: Any) -> None:
        with (given.folder / f"samples{model.worker}.jsonl").open("a") as file:
            file.write(json.dumps({"life": LIFE, "version": model.version, **line}) + "\n")

    note(begins=True)
    loader: Any = DataLoader(data, batch_sampler=sampler)
    while sampler.epoch < EPOCHS:
        epoch = sampler.epoch
        for x, numbers in loader:
            model(x).square().mean().backward()
            receipt: Any = optimizer.step()
            optimizer.zero_grad()
            if receipt.applied:
                note(epoch=epoch, samples=numbers.tolist())
            if LIFE == 0 and model.worker == 1 and model.version >= DIES_AT:
                model.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
    model.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
