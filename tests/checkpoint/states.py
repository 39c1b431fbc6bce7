"""States to save, and functions to compare and to damage them."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quorate.checkpoint import CheckpointFolder

FILES = ["tensors.safetensors", "state.json", "manifest.json"]


def same(one: Any, other: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (one == other and str(one) == str(other))
    return bool(one == other)


def bits(tensor: Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).tolist()


def some_state(number: int) -> dict[str, Any]:
    return {
        "learner": {"model": {"weight": torch.full((4, 3), float(number)), "steps": torch.tensor(number)}},
        "policy": {"pairs": [(number, 0.5)], 3: None},
    }


def temporary_folders(folder: CheckpointFolder) -> list[str]:
    return [entry.name for entry in folder.folder.iterdir() if entry.name.startswith(".")]


def made(run: Path, *versions: int) -> CheckpointFolder:
    folder = CheckpointFolder(run)
    for version in versions:
        folder.save(version, some_state(version))
    return folder


@contextmanager
def short_lived() -> Iterator[Path]:
    """A folder for one Hypothesis example, since fixtures last for all examples; without fsync, to save time."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield Path(name)


def flip(file: Path, position: int, bit: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= bit
    file.write_bytes(content)
