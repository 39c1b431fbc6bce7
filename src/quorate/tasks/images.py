"""What tasks on small pictures share: random shifts, flips and turns, numbers of a useful size, and a measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

#: Pictures measured at a time.
_AT_ONCE = 2000


def shifted_and_flipped(images: Tensor, most: int = 4) -> Tensor:
    """Each picture of [n, channels, height, width] moved by up to `most` pixels, half of them mirrored.

    What moves in from outside is black. Chance is torch's own on the device of the pictures, which engines seed by
    the batch: whoever computes a batch, and however often, sees the same.
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
    """Each picture of [n, channels, size, size] turned and made larger or smaller about its middle, as floats.

    What comes in from outside is black. Between pixels it is linear. Chance is as in `shifted_and_flipped`.
    """
    n = len(images)
    draws = 2.0 * torch.rand(2, n, device=images.device) - 1.0
    angle, zoom = draws[0] * math.radians(most_degrees), 1.0 + draws[1] * most_zoom
    cos, sin, still = angle.cos() / zoom, angle.sin() / zoom, torch.zeros_like(angle)
    where_from = torch.stack([cos, -sin, still, sin, cos, still], 1).view(n, 2, 3)
    places = functional.affine_grid(where_from, list(images.shape), align_corners=False)
    return functional.grid_sample(images.float(), places, align_corners=False)


def standardised(images: Tensor, means: Sequence[float], deviations: Sequence[float]) -> Tensor:
    """Bytes [n, channels, h, w] as floats with mean 0 and deviation 1 in each channel; `means` are those of 0..1."""
    mean, deviation = (_by_channel(tuple(values), images.device) for values in (means, deviations))
    return (images.float() / 255.0 - mean) / deviation


@cache
def _by_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Made once: what is copied to a GPU in every step makes the CPU wait, and cannot be part of a CUDA graph."""
    return torch.tensor(values, device=device)[:, None, None]


def accuracy_and_loss(scores_of: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> dict[str, float]:
    """Share of labels that the highest score names, and the mean cross-entropy."""
    right, loss = 0, 0.0
    for some, wanted in zip(torch.split(images, _AT_ONCE), torch.split(labels, _AT_ONCE), strict=True):
        scores = scores_of(some).float()
        right += int((scores.argmax(1) == wanted).sum())
        loss += functional.cross_entropy(scores, wanted, reduction="sum").item()
    return {"accuracy": right / len(labels), "test_loss": loss / len(labels)}
