"""Trains with `quorate.Sampler` for so many updates, and goes on from a checkpoint: `resized.py FOLDER POLICY UPDATES`.

The next launch may have another number of processes. Applied batches are noted in FOLDER/used<workers>-<worker>.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quorate
from tests.data_parallel.scripts.meeting import meet

SAMPLES, EPOCHS = 70, 2


def main() -> None:
    worker, workers = meet()
    folder, name, updates = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.arange(SAMPLES))
    sampler = quorate.Sampler(data, 4)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    policy: Any = quorate.FullSync() if name == "full" else quorate.BackupSync(workers - 1, 1)
    model = quorate.DataParallel(net, optimizer, policy, sampler=sampler, checkpoint=folder / "run")
    begun, used = model.version, []
    loader: Any = DataLoader(data, batch_sampler=sampler)
    while sampler.epoch < EPOCHS and model.version < updates:
        epoch = sampler.epoch
        for x, numbers in loader:
            model(x).square().mean().backward()
            receipt: Any = optimizer.step()
            optimizer.zero_grad()
            used += [[epoch, sample] for sample in numbers.tolist()] if receipt.applied else []
            if model.version >= updates:
                break
        else:
            dist.barrier()
            model.check_identical()
    model.finish()
    seen = {"begun": begun, "ended": model.version, "used": used, "epoch": sampler.epoch}
    (folder / f"used{workers}-{worker}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
