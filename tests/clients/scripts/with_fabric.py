"""An image classifier with Lightning Fabric, in the style of its examples.

Validation and logging add up by `fabric.all_reduce` and `all_gather`, checkpoints are saved by `fabric.save` after
every epoch and loaded by `fabric.load`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import quorate
from quorate.data_parallel.integrations.fabric import QuorateStrategy, data_parallel
from tests.clients.harness import WORKERS, Case, run, same_everywhere, values

EPOCHS, BATCH, SAMPLES, TESTED, CLASSES = 2, 8, 120, 36, 4


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, CLASSES))


def images(count: int, seed: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    pictures = torch.randn(count, 1, 6, 6, generator=draw)
    pictures[torch.arange(count), 0, labels] += 1.5
    return TensorDataset(pictures, labels)


def script(case: Case, folder: Path) -> dict[str, Any]:
    train, test = images(SAMPLES, 1), images(TESTED, 2)
    sampler = quorate.Sampler(train, BATCH) if case.samples else None
    strategy = DDPStrategy() if case.policy is None else QuorateStrategy(case.policy(), sampler=sampler)
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(7, verbose=False)
    net = network()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = fabric.setup(net, optimizer)
    loader: Any
    if sampler is None:
        shuffled: Any = DistributedSampler(train)
        loader = fabric.setup_dataloaders(DataLoader(train, batch_size=BATCH, sampler=shuffled))
    else:
        loader = fabric.setup_dataloaders(DataLoader(train, batch_sampler=sampler), use_distributed_sampler=False)
    test_loader: Any = fabric.setup_dataloaders(DataLoader(test, batch_size=BATCH))

    scores, losses, used = [], [], []
    for epoch in range(EPOCHS):
        model.train()
        total, count = torch.zeros(()), 0
        used.append(0)
        for pictures, labels in loader:
            case.dawdle()
            optimizer.zero_grad()
            loss = cross_entropy(model(pictures), labels)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            receipt = optimizer.step()
            total, count = total + loss.detach() * len(labels), count + len(labels)
            used[-1] += bool(case.is_ddp or receipt.applied)
        schedule.step()
        total, count = (float(fabric.all_reduce(one, reduce_op="sum")) for one in (total, count))
        losses.append(total / count)
        model.eval()
        right = torch.zeros(2)
        with torch.no_grad():
            for pictures, labels in test_loader:
                right += torch.tensor([float((model(pictures).argmax(1) == labels).sum()), len(labels)])
        right = fabric.all_gather(right).sum(0)
        assert right[1] == TESTED
        scores.append(float(right[0] / right[1]))
        fabric.save(folder / f"{case.name} {epoch}.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})

    fabric.barrier()
    saved = fabric.load(folder / f"{case.name} {EPOCHS - 1}.ckpt")
    if not case.is_ddp:
        data_parallel(model).finish()
    fresh = network()
    fresh.load_state_dict(saved["model"])
    return {
        "values": values(net),
        "same": same_everywhere(net),
        "saved": values(fresh) == values(net),
        "losses": losses,
        "scores": scores,
        "used": used,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(script)
    torch.distributed.destroy_process_group()
