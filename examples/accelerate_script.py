"""A Hugging Face Accelerate script that trains with quorate; the line that differs is marked.

    torchrun --nproc-per-node 3 examples/accelerate_script.py --backups 1

Accelerate places tensors on devices, casts to bfloat16, adds up two batches a step and schedules; quorate decides whose
gradients make an update. In a clone: `pip install '.[accelerate]'`.
"""

from __future__ import annotations

import argparse
import time

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import quorate
from quorate.data_parallel.integrations.accelerate import prepare
from quorate.tasks.digits import Digits, split_digits

ACCUMULATE = 2


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE
    )
    workers, backups = accelerator.num_processes, options.backups
    policy = quorate.BackupSync(workers - backups, backups) if backups else quorate.FullSync()
    is_slow = options.straggler and accelerator.process_index == workers - 1
    train, test = split_digits()
    torch.manual_seed(0)
    net = Digits().model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    sampler = quorate.Sampler(
        train, batch_size=8, accumulate=ACCUMULATE
    )  # whatever is dropped, each sample counts once
    loader = DataLoader(train, batch_sampler=sampler)

    # ↓ instead of model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepare(
        accelerator, net, optimizer, loader, scheduler, policy=policy, sampler=sampler, out=options.out
    )

    used, dropped = 0, 0
    for _ in range(options.epochs):
        for images, labels in loader:
            if is_slow:
                time.sleep(0.03)
            with accelerator.accumulate(model):
                loss = cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                used, dropped = used + model.receipt.applied, dropped + (not model.receipt.applied)
    model.finish()

    with torch.no_grad():
        images, labels = (tensor.to(accelerator.device) for tensor in test.tensors)
        accuracy = (model.module.eval()(images).argmax(1) == labels).float().mean()
    print(f"worker {accelerator.process_index}: {used} gradients used, {dropped} dropped, {accuracy:.1%}")
    accelerator.end_training()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="trains a small net on digits with Accelerate and quorate")
    parser.add_argument("--backups", type=int, default=0, help="do not wait for the slowest so many processes")
    parser.add_argument("--straggler", action="store_true", help="the last process is slow")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", help="a folder for the trace, to look at with `quorate report`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
