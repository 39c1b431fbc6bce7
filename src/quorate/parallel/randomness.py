"""The state of torch's random numbers, which each process has for itself: kept beside the checkpoints.

    checkpoints/random/00003-00000007.json      worker 3, version 7

A checkpoint is written by one process, but each draws its own dropout and its own augmentation. So each writes a small
file of its own, without a word to the others.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: More than the two checkpoints that are kept: others may be ahead of the one who writes those.
KEPT = 4


def random_state() -> dict[str, Tensor]:
    """The state of this process: of the CPU, and of the GPU it uses, if it uses one."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Go on from there; what is missing, or is for a GPU where none is, is left as it is."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class Randomness:
    """The files of one worker. Only its randomness depends on them: what cannot be written or read is passed over."""

    def __init__(self, checkpoints: Path, worker: int) -> None:
        self._folder, self._worker = checkpoints / "random", worker
        self._written: list[Path] = []

    def save(self, version: int, state: dict[str, Tensor]) -> None:
        texts = {name: base64.b64encode(tensor.numpy().tobytes()).decode() for name, tensor in state.items()}
        temporary = self._folder / f".writing-{self._worker:05d}-{os.getpid()}"
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"version": version, "sha256": _digest(texts), "states": texts}))
            temporary.replace(self._file(version))
            self._remove_old(version)

    def load(self, version: int) -> dict[str, Tensor] | None:
        """What this worker drew next after that version; None where that is not known.

        A worker that died before it had seen the version has only an earlier state: it draws again what it drew then.
        """
        for file in reversed(self._files()):
            state = _read(file) if file.name <= self._file(version).name else None
            if state is not None:
                return state
        return None

    def _file(self, version: int) -> Path:
        return self._folder / f"{self._worker:05d}-{version:08d}.json"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"{self._worker:05d}-*.json"))

    def _remove_old(self, version: int) -> None:
        if not self._written:  # those of an earlier life
            self._written = self._files()
        file = self._file(version)
        self._written = [*(one for one in self._written if one != file), file]
        for old in self._written[:-KEPT]:
            old.unlink(missing_ok=True)
        self._written = self._written[-KEPT:]


def _read(file: Path) -> dict[str, Tensor] | None:
    try:
        record: Any = json.loads(file.read_text())
        if record["sha256"] != _digest(record["states"]):
            return None
        return {
            name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            for name, text in record["states"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(texts: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
