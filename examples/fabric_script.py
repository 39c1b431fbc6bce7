"""A Lightning Fabric script that trains with quorate; the line that differs is marked.

    python examples/fabric_script.py --workers 3 --backups 1

Fabric starts the processes, casts to bfloat16, and saves; quorate decides whose gradients make an update.
In a clone: `pip install '.[fabric]'`.
"""

from __future__ import annotations

import argparse
import time

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import quorate
from quorate.data_parallel.integrations.fabric import QuorateStrategy, data_parallel
from quorate.tasks.digits import Digits, split_digits


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    workers, backups = options.workers, options.backups
    policy = quorate.BackupSync(workers - backups, backups) if backups else quorate.FullSync()
    train, test = split_digits()
    sampler = quorate.Sampler(train, batch_size=16)  # whatever is dropped, each sample counts once an epoch

    strategy = QuorateStrategy(policy, sampler=sampler, out=options.out)  # ← instead of strategy="ddp"
    fabric = Fabric(accelerator="auto", devices=workers, strategy=strategy, precision="bf16-mixed")
    fabric.launch()
    is_slow = options.straggler and fabric.global_rank == workers - 1

    torch.manual_seed(0)
    net = Digits().model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(train, batch_sampler=sampler), use_distributed_sampler=False)

    used, dropped = 0, 0
    for epoch in range(options.epochs):
        for images, labels in loader:
            if is_slow:
                time.sleep(0.05)
            loss = cross_entropy(model(images), labels)
            fabric.backward(loss)
            receipt = optimizer.step()
            optimizer.zero_grad()
            used, dropped = used + receipt.applied, dropped + (not receipt.applied)
        if options.save:  # all processes are at the same version here: the epoch's last
            fabric.save(options.save, {"model": model, "optimizer": optimizer, "epoch": epoch})
    data_parallel(model).finish()

    model.eval()
    with torch.no_grad():
        images, labels = fabric.to_device(test.tensors)
        accuracy = (model(images).argmax(1) == labels).float().mean()
    print(f"worker {fabric.global_rank}: {used} gradients used, {dropped} dropped, {accuracy:.1%}", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="trains a small net on digits with Lightning Fabric and quorate")
    parser.add_argument("--workers", type=int, default=2, help="how many processes")
    parser.add_argument("--backups", type=int, default=0, help="do not wait for the slowest so many of them")
    parser.add_argument("--straggler", action="store_true", help="the last process is slow")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--save", help="a file to save to after every epoch")
    parser.add_argument("--out", help="a folder for the trace, to look at with `quorate report`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
