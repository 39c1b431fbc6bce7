"""One training script, with PyTorch's DistributedDataParallel or with quorate; the five lines that differ are numbered.

    torchrun --nproc-per-node 3 examples/torchrun_script.py --ddp
    torchrun --nproc-per-node 3 examples/torchrun_script.py                 # every gradient of every process is used
    torchrun --nproc-per-node 3 examples/torchrun_script.py --backups 1     # the first two of three make the update

It trains a small net on the digits that come with quorate, on CPUs or on GPUs. `--straggler` makes the last process
slow: each of its batches takes 50 ms longer. With DDP all wait for it; with a backup nobody does.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import quorate  # ← 1
from quorate.tasks.digits import Digits, split_digits


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    workers = dist.get_world_size()
    is_slow = options.straggler and dist.get_rank() == workers - 1
    train, test = split_digits()
    torch.manual_seed(0)
    net = Digits().model().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)

    if options.ddp:
        sampler = DistributedSampler(train)
        model = DistributedDataParallel(net)
        loader = DataLoader(train, options.batch_size, sampler=sampler)
    else:
        backups = options.backups
        policy = quorate.BackupSync(workers - backups, backups) if backups else quorate.FullSync()
        sampler = quorate.Sampler(train, options.batch_size)  # ← 2  whatever is dropped, a sample counts once an epoch
        model = quorate.DataParallel(net, optimizer, policy, sampler=sampler, out=options.out)  # ← 3
        loader = DataLoader(train, batch_sampler=sampler)  # ← 4

    began, used, dropped = time.perf_counter(), 0, 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            if is_slow:
                time.sleep(0.05)
            loss = cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            receipt = optimizer.step()
            optimizer.zero_grad()
            was_used = options.ddp or receipt.applied
            used, dropped = used + was_used, dropped + (not was_used)
        scheduler.step()
    if not options.ddp:
        model.finish()  # ← 5  all end together, with the same parameters; without it, when the script ends

    seconds = time.perf_counter() - began
    with torch.no_grad():
        images, labels = (tensor.to(device) for tensor in test.tensors)
        accuracy = (net.eval()(images).argmax(1) == labels).float().mean()
    print(f"worker {dist.get_rank()}: {used} gradients used, {dropped} dropped, {accuracy:.1%} in {seconds:.1f} s")
    dist.destroy_process_group()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="trains a small net on digits, with DDP or with quorate")
    parser.add_argument("--ddp", action="store_true", help="use PyTorch's DistributedDataParallel")
    parser.add_argument("--backups", type=int, default=0, help="do not wait for the slowest so many processes")
    parser.add_argument("--straggler", action="store_true", help="the last process is slow")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a batch of one process")
    parser.add_argument("--out", help="a folder for the trace, to look at with `quorate report`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
