"""A training script that survives the death of a process. Run it on a CPU, and let one die:

    quorate launch --workers 3 --restarts 2 examples/elastic.py --dies-at 120

Process 1 kills itself at version 120, once. All start again, and they go on from the last checkpoint. docs/elastic.md
has the same for torchrun.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn

import quorate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", default="elastic-run", help="for checkpoints; a folder with one goes on")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--dies-at", type=int, default=-1)
    given = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.updates)
    model = quorate.DataParallel(
        net, optimizer, checkpoint=given.folder, checkpoint_every=10, also={"scheduler": scheduler}
    )
    if model.worker == 0:
        print(f"begins at version {model.version}", flush=True)

    while model.version < given.updates:  # not `for … in range(updates)`: a restarted script begins in the middle
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if is_first_life and model.worker == 1 and model.version == given.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    model.finish()
    if model.worker == 0:
        print(f"ends at version {model.version}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
