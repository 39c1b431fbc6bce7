"""Data for quick runs, where nothing may be fetched."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset


def pictures(samples: int, kinds: int = 4, channels: int = 3, size: int = 32, seed: int = 7) -> TensorDataset:
    """Pictures in bytes [n, channels, size, size] and labels [n]: which quarter is brightest, more or less."""
    draws = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, kinds, (samples,), generator=draws)
    images = 100 + 30 * torch.randn(samples, channels, size, size, generator=draws)
    half = size // 2
    for kind in range(kinds):
        row, column = half * (kind // 2 % 2), half * (kind % 2)
        images[labels == kind, :, row : row + half, column : column + half] += 40
    return TensorDataset(images.clamp(0, 255).to(torch.uint8), labels)
