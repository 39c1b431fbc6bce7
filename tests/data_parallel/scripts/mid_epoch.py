"""Two epochs with dropout, that may end early: `mid_epoch.py FOLDER LOADING END VERSION`.

LOADING: processes of each data loader. Without any, samples are loaded with noise from the same generator as dropout.
END: "whole", or what happens at VERSION: "killed" in the next forward, or "finished" by the script.
A folder that holds a checkpoint is gone on from. At the end everybody writes FOLDER/digestWORKER.txt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import quorate
from tests.data_parallel.scripts.meeting import meet

SAMPLES, BATCH, EPOCHS = 48, 4, 2  # six versions an epoch with two workers


class Noisy(Dataset[Tensor]):
    def __init__(self, noise: float) -> None:
        self._rows = torch.arange(SAMPLES * 6.0).reshape(SAMPLES, 6).sin()
        self._noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self._rows[index] + (self._noise * torch.randn(6) if self._noise else 0)


def main() -> None:
    folder, loading, end, at = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    worker, _ = meet()
    torch.manual_seed(worker)
    data = Noisy(0.0 if loading else 0.1)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    sampler = quorate.Sampler(data, BATCH)
    model = quorate.DataParallel(net, optimizer, sampler=sampler, checkpoint=folder / "run")
    loader: Any = DataLoader(data, batch_sampler=sampler, num_workers=loading)
    tested: Any = DataLoader(data, batch_size=16, shuffle=True)  # draws from the same generator

    def finish_if_due() -> None:
        if end == "finished" and model.version == at:
            model.finish()
            sys.exit()

    while sampler.epoch < EPOCHS:
        for x in loader:
            loss = model(x).square().mean()
            if end == "killed" and model.version == at:
                os._exit(0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.version % 6:
                finish_if_due()
        with torch.no_grad():
            sum(float(model(x).mean()) for x in tested)
        finish_if_due()
    model.finish()
    (folder / f"digest{worker}.txt").write_text(model.digest())


if __name__ == "__main__":
    try:
        main()
    except quorate.ProcessLost:
        if sys.argv[3] != "killed":
            raise
        os._exit(0)  # the other process was killed first
