"""Shared parts of the ready-made tasks: augmentation and scaling of pictures, evaluation, learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

from quorate.errors import BadInput, check_at_least, unknown_name
from quorate.task import Task

#: Pictures in one batch of an evaluation.
_AT_ONCE = 2000


class ScheduledTask(Task):
    """A task with its training data in `_train`. `share_of_lr` multiplies the learning rate."""

    _train: TensorDataset
    _rise_and_fall: RiseAndCosine

    def train_data(self) -> TensorDataset:
        return self._train

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, self.share_of_lr)

    def share_of_lr(self, version: int) -> float:
        """Factor of the learning rate for the update that follows `version`."""
        return self._rise_and_fall(version)


def checked_precision(precision: str | None, known: Sequence[str] = ("float32", "tf32")) -> str | None:
    if precision not in (None, *known):
        raise unknown_name("precision", str(precision), known)
    return precision


def use_precision(precision: str | None) -> None:
    """Let a GPU compute products in tf32 or not; None leaves torch's setting."""
    if precision is not None:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


def first_samples(data: TensorDataset, samples: int | None, name: str) -> TensorDataset:
    """The first samples of the data; None: all. `name` is that of the argument, for messages."""
    if samples is None:
        return data
    if check_at_least(name, samples, 1) > len(data):
        raise BadInput(f"{name} is {samples}, but there are {len(data)}")
    return TensorDataset(*(tensor[:samples] for tensor in data.tensors))


def mean_loss(task: Task, model: nn.Module, samples: Tensor, at_once: int) -> float:
    """The mean loss of samples without labels, computed in batches of `at_once`."""
    device = next(model.parameters()).device
    total = 0.0
    for some in torch.split(samples, at_once):
        total += task.loss(model, [some.to(device)]).item() * len(some)
    return total / len(samples)


def shifted_and_flipped(images: Tensor, most: int = 4) -> Tensor:
    """Each picture of [n, channels, height, width] shifted by up to `most` pixels, half of them mirrored.

    Pixels from outside are black. Random numbers come from torch's generator on the device of the pictures. Engines
    seed it by batch, so every computation of a batch sees the same pictures.
    """
    n, channels, height, width = images.shape
    device = images.device
    draws = torch.rand(3, n, device=device)
    down, right = (draws[:2] * (2 * most + 1)).long()
    rows = torch.arange(height, device=device) + down[:, None]
    columns = torch.arange(width, device=device).expand(n, width)
    columns = torch.where(draws[2][:, None] < 0.5, columns.flip(1), columns) + right[:, None]
    padded = functional.pad(images, (most,) * 4)
    picture = torch.arange(n, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[None, :, None, None]
    return padded[picture, channel, rows[:, None, :, None], columns[:, None, None, :]]


def turned_and_zoomed(images: Tensor, most_degrees: float = 10.0, most_zoom: float = 0.1) -> Tensor:
    """Each picture of [n, channels, size, size] rotated and scaled about its centre, as floats.

    Pixels from outside are black; the interpolation is linear. Random numbers are drawn as in `shifted_and_flipped`.
    """
    n = len(images)
    draws = 2.0 * torch.rand(2, n, device=images.device) - 1.0
    angle, zoom = draws[0] * math.radians(most_degrees), 1.0 + draws[1] * most_zoom
    cos, sin, zero = angle.cos() / zoom, angle.sin() / zoom, torch.zeros_like(angle)
    matrices = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(n, 2, 3)
    grid = functional.affine_grid(matrices, list(images.shape), align_corners=False)
    return functional.grid_sample(images.float(), grid, align_corners=False)


def standardised(images: Tensor, means: Sequence[float], deviations: Sequence[float]) -> Tensor:
    """Bytes [n, channels, h, w] as floats with mean 0 and deviation 1 in each channel.

    means, deviations: of each channel, for values in 0..1.
    """
    mean, deviation = (_by_channel(tuple(values), images.device) for values in (means, deviations))
    return (images.float() / 255.0 - mean) / deviation


@cache
def _by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Cached: a copy to the GPU in every step makes the CPU wait and cannot be part of a CUDA graph."""
    return torch.tensor(values, device=device)[:, None, None]


def accuracy_and_loss(scores_of: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> dict[str, float]:
    """Share of pictures whose highest score is at their label, and the mean cross-entropy."""
    right, loss = 0, 0.0
    for some, wanted in zip(torch.split(images, _AT_ONCE), torch.split(labels, _AT_ONCE), strict=True):
        scores = scores_of(some).float()
        right += int((scores.argmax(1) == wanted).sum())
        loss += functional.cross_entropy(scores, wanted, reduction="sum").item()
    return {"accuracy": right / len(labels), "test_loss": loss / len(labels)}


@dataclass(frozen=True)
class RiseAndCosine:
    """Learning rate factor: rises over the first `warm_up_share` of `updates`, then falls to `floor` along a cosine.

    updates: None keeps the factor at 1.
    """

    updates: int | None
    warm_up_share: float
    floor: float = 0.0

    def __post_init__(self) -> None:
        if self.updates is not None:
            check_at_least("updates", self.updates, 1)
        if not 0 <= self.warm_up_share < 1:
            raise BadInput(
                f"warm_up_share is {self.warm_up_share}, but a share of the training is at least 0 and below 1"
            )

    def __call__(self, version: int) -> float:
        if self.updates is None:
            return 1.0
        warm_up = self.updates * self.warm_up_share
        if version < warm_up:
            return (version + 1) / (warm_up + 1)
        done = min(1.0, (version - warm_up) / (self.updates - warm_up))
        return self.floor + (1 - self.floor) / 2 * (1 + math.cos(math.pi * done))
