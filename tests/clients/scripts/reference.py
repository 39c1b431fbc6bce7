"""A classification script in the style of reference implementations, trained by epochs.

Warm-up and cosine schedules by epoch, an averaged model (EMA) with its buffers, bfloat16 autocast, data loaders with
processes of their own, metrics that all processes add up, and checkpoints that process 0 writes. (Where the numbers of
DDP are compared it computes in float32: a rounding to bfloat16 makes large differences of the smallest ones.)
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import quorate
from tests.clients.harness import Case, run, same_everywhere, values

EPOCHS, WARM_UP_EPOCHS, BATCH, LOADING = 3, 1, 8, 2
SAMPLES, TESTED, CLASSES = 120, 36, 4


class Images(Dataset[tuple[Tensor, int, int]]):
    """Noise with a bright quarter, which is the class; also gives the number of the image."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (count,), generator=draw)
        self.images = 0.5 * torch.randn(count, 3, 8, 8, generator=draw)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            image[:, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        return self.images[index], int(self.labels[index]), index


class Meter:
    """A sum and a count, which can be added up over all processes."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float, count: int = 1) -> None:
        self.total, self.count = self.total + value * count, self.count + count

    def synchronize_between_processes(self) -> None:
        both = torch.tensor([self.total, self.count], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(both)
        self.total, self.count = float(both[0]), int(both[1])

    @property
    def average(self) -> float:
        return self.total / max(self.count, 1)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def train_one_epoch(
    case: Case, model: Any, criterion: Any, optimizer: Any, loader: Any, ema: Any, warms_up: bool, used: Counter[int]
) -> Meter:
    model.train()
    meter = Meter()
    for step, (image, target, numbers) in enumerate(loader):
        case.dawdle()
        with torch.autocast("cpu", torch.bfloat16) if case.samples else nullcontext():
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        receipt = optimizer.step()
        if step % 2 == 0:
            ema.update_parameters(model.module)
            if warms_up:
                ema.n_averaged.fill_(0)
        meter.update(loss.item(), len(target))
        if case.is_ddp or receipt.applied:
            used.update(numbers.tolist())
    return meter


@torch.inference_mode()
def evaluate(model: nn.Module, criterion: Any, loader: Any) -> float:
    model.eval()
    right = Meter()
    for image, target, _ in loader:
        right.update(float((model(image).argmax(1) == target).float().mean()), len(target))
    right.synchronize_between_processes()
    assert right.count == TESTED
    return right.average


def script(case: Case, folder: Path) -> dict[str, Any]:
    train, test = Images(SAMPLES, 1), Images(TESTED, 2)
    net = convolutional()
    norms = [one for layer in net if isinstance(layer, nn.BatchNorm2d) for one in layer.parameters()]
    rest = [one for one in net.parameters() if not any(one is norm for norm in norms)]
    optimizer = torch.optim.SGD(
        [{"params": norms, "weight_decay": 0.0}, {"params": rest}],
        lr=0.1,
        momentum=0.9,
        weight_decay=1e-4,
        nesterov=True,
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=WARM_UP_EPOCHS)
    cosine = CosineAnnealingLR(optimizer, T_max=EPOCHS - WARM_UP_EPOCHS)
    schedule = SequentialLR(optimizer, [warm_up, cosine], milestones=[WARM_UP_EPOCHS])

    sampler: Any
    model: Any
    if case.samples:
        sampler = quorate.Sampler(train, BATCH)
        loader: Any = DataLoader(train, batch_sampler=sampler, num_workers=LOADING)
    else:
        sampler = DistributedSampler(train)
        loader = DataLoader(train, batch_size=BATCH, sampler=sampler, num_workers=LOADING)
    test_sampler: Any = DistributedSampler(test, shuffle=False)
    test_loader = DataLoader(test, batch_size=BATCH, sampler=test_sampler, num_workers=LOADING)
    if case.policy is None:
        model = DistributedDataParallel(net)
    else:
        model = quorate.DataParallel(net, optimizer, case.policy(), sampler=sampler if case.samples else None)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    saved = folder / f"{case.name}.pth"
    used: list[Counter[int]] = []
    scores, losses = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        used.append(Counter())
        meter = train_one_epoch(case, model, criterion, optimizer, loader, ema, epoch < WARM_UP_EPOCHS, used[-1])
        if not case.is_ddp:
            model.meet()  # with a delay, the last updates are still on their way
        meter.synchronize_between_processes()
        losses.append(meter.average)
        schedule.step()
        scores.append([evaluate(model, criterion, test_loader), evaluate(ema, criterion, test_loader)])
        if dist.get_rank() == 0:
            state = {"model": net, "optimizer": optimizer, "schedule": schedule, "ema": ema}
            torch.save({name: one.state_dict() for name, one in state.items()} | {"epoch": epoch}, saved)
        dist.barrier()  # all wait for the checkpoint

    if not case.is_ddp:
        model.finish()
    fresh = convolutional()
    fresh.load_state_dict(torch.load(saved)["model"])
    return {
        "values": values(net),
        "same": same_everywhere(net),
        "saved": values(fresh) == values(net),
        "losses": losses,
        "scores": scores,
        "used": [dict(one) for one in used],
        "rate": optimizer.param_groups[0]["lr"],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(script)
    dist.destroy_process_group()
