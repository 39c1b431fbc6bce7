"""Checkpoints of a `DataParallel` run: what is in them, when they are taken, and how a run goes on from one.

A version is noted where `optimizer.step()` has made it (`reached`), and copied where the next iteration begins
(`take`): in between a script steps its LR scheduler, its GradScaler and its averaged model, and these belong to the
version. Worker 0 writes the copy in a thread, while the next iteration is computed; before the next version is made,
it waits for the disk (`settle`). So at most one version is made beyond what is saved.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quorate._tensor_state import find_safetensors
from quorate.checkpoint import BackgroundWriter, CheckpointFolder, Loaded, check_can_save, check_same_tensors
from quorate.checkpointing import warn
from quorate.errors import BadInput, check_at_least
from quorate.parallel.randomness import Randomness, random_state, set_random_state

#: What is in a checkpoint of this kind, as against one of `quorate.train`.
CONTENT = ("model", "optimizer", "also", "random", "extra")
#: A crash of the machine, not of a process, may cost so many seconds: only so often the disk is waited for.
DURABLE_EVERY_S = 30.0


class Saver:
    """The checkpoints of one script: made on every process, written by worker 0.

    folder: where they are; each process looks into its own, whether it is the same disk or not.
    also: further things that belong to a version, by name: a scheduler, a GradScaler, an averaged model.
    every: so many versions at most are lost when a process dies.
    durable_every_s: so often a checkpoint is brought to disk in a way that survives a crash of the machine.
    """

    def __init__(
        self,
        folder: str | Path,
        module: nn.Module,
        optimizer: Optimizer,
        also: Mapping[str, Any] | None = None,
        every: int = 1,
        *,
        worker: int = 0,
        durable_every_s: float = DURABLE_EVERY_S,
    ) -> None:
        self.every = check_at_least("checkpoint_every", every, 1)
        self.worker = worker
        self._module, self._optimizer, self._also = module, optimizer, _checked(also)
        path = _path(folder)
        find_safetensors()
        check_can_save(_plain(self._state()))  # rather now than after an hour
        self.folder = _TimedFolder(path, durable_every_s)
        self._randomness = Randomness(self.folder.folder, worker)
        if self.writes:
            _check_writable(path)
            self.folder.sweep()
        self._writer = BackgroundWriter(self.folder, self._failed, self._saved)
        self._copies = _Copies()
        self._noted: tuple[int, dict[str, Any], dict[str, Tensor]] | None = None
        self._last = 0  # the version last reached
        self._settling = threading.Lock()
        self._has_warned = False

    @property
    def writes(self) -> bool:
        """Whether this process writes the model; the others write only their own randomness."""
        return self.worker == 0

    # ------------------------------------------------------------ saving

    def is_due(self, version: int) -> bool:
        """Whether a version is to be saved; some may have gone by without this process."""
        return version // self.every > self._last // self.every

    def reached(self, version: int, extra: dict[str, Any] | None = None) -> None:
        """A version is made here that is to be saved: note what the script will change before `take`.

        That is the randomness, of which the next batch may take some, and what the caller adds (its sampler's place).
        """
        random = random_state()
        self._noted, self._last = (version, dict(extra or {}), random), version
        if not self.writes:
            self._randomness.save(version, random)

    @property
    def is_waiting(self) -> bool:
        """Whether a version was reached that is not copied yet."""
        return self._noted is not None

    def take(self) -> None:
        """Copy the version last reached, if it is not saved yet; the copy is written while the script goes on."""
        if self._noted is None:
            return
        (version, extra, random), self._noted = self._noted, None
        if not self.writes:
            return
        self.settle()  # one set of copies: the last one must be written before they are used again
        state = {**self._state(), "random": random, "extra": extra}
        self._writer.submit(version, self._copies.of(state))

    def save(self, version: int, extra: dict[str, Any] | None = None) -> None:
        """Save a version as it is now."""
        self.reached(version, extra)
        self.take()

    def settle(self) -> None:
        """Wait until the last checkpoint is written. To be called before the next version can be made."""
        with self._settling:  # asked for by the thread that computes and the one that communicates
            self._writer.finish()

    def close(self) -> None:
        """Save what was reached last, and wait for it."""
        self.take()
        self.settle()

    def _state(self) -> dict[str, Any]:
        optimizer = self._optimizer.state_dict()
        return {
            "model": self._module.state_dict(),
            "optimizer": {"kind": type(self._optimizer).__name__, **optimizer},
            "also": {name: thing.state_dict() for name, thing in self._also.items()},
        }

    def _failed(self, sentence: str) -> None:
        if not self._has_warned:  # the disk may be full for hours, and a line a version helps nobody
            self._has_warned = True
            warn(f"{sentence} (checkpoints that fail after this one are not reported)")

    def _saved(self, version: int) -> None:
        self._has_warned = False

    # ------------------------------------------------------------ going on

    def load(self) -> Loaded | None:
        """The newest sound checkpoint that this process sees, or None where there is none."""
        if not self.folder.versions():
            return None
        loaded = self.folder.load()
        for sentence in loaded.damaged:
            warn(sentence)
        return loaded

    def restore(self, loaded: Loaded) -> dict[str, Any]:
        """Make everything as it was at that version, and give back what the caller had added.

        All of it is looked at first: a checkpoint that does not fit changes nothing.
        """
        state = loaded.state
        if missing := [name for name in CONTENT if name not in state]:
            raise BadInput(
                f"the checkpoint of version {loaded.version} in {str(self.folder.folder)!r} has no {missing[0]}: "
                "it is not one of a DataParallel run; give checkpoint= another folder"
            )
        check_same_tensors(_tensors(self._module.state_dict()), _tensors(state["model"]), "model")
        saved = dict(state["optimizer"])
        self._check_optimizer(saved.pop("kind"), saved)
        self._check_also(state["also"])
        self._module.load_state_dict(_like(state["model"], self._module.state_dict()))
        self._optimizer.load_state_dict(saved)
        for name, thing in self._also.items():
            thing.load_state_dict(_like(state["also"][name], thing.state_dict()))
        random = state["random"] if self.worker == 0 else self._randomness.load(loaded.version)
        if random is not None:
            set_random_state(random)
        self._last = loaded.version
        extra: dict[str, Any] = state["extra"]
        return extra

    def _check_optimizer(self, kind: str, saved: dict[str, Any]) -> None:
        here = self._optimizer.state_dict()["param_groups"]
        if kind != type(self._optimizer).__name__:
            raise BadInput(
                f"the checkpoint was made with the optimizer {kind}, but here it is {type(self._optimizer).__name__}; "
                "use the same, or give checkpoint= another folder"
            )
        sizes = [[len(group["params"]) for group in groups] for groups in (saved["param_groups"], here)]
        if sizes[0] != sizes[1]:
            raise BadInput(
                f"the checkpoint is of an optimizer with other parameter groups: they have {_listed(sizes[0])} "
                f"parameters there, {_listed(sizes[1])} here"
            )

    def _check_also(self, saved: dict[str, Any]) -> None:
        for name in self._also.keys() - saved.keys():
            raise BadInput(f"also= names {name!r}, which is not in the checkpoint; leave it out, or start anew")
        for name in saved.keys() - self._also.keys():
            raise BadInput(f"the checkpoint has {name!r}, which also= does not name; add it, or start anew")


class _TimedFolder(CheckpointFolder):
    """Waits for the disk now and then, and leaves the other checkpoints to the kernel: no process can lose them."""

    def __init__(self, run: Path, durable_every_s: float) -> None:
        super().__init__(run)
        self._every_s, self._durable_at_s = durable_every_s, -float("inf")

    def save(self, version: int, state: dict[str, Any], *, durable: bool = True) -> Path:
        now_s = time.monotonic()
        durable = now_s - self._durable_at_s >= self._every_s
        saved = super().save(version, state, durable=durable)
        if durable:
            self._durable_at_s = now_s
        return saved


# ------------------------------------------------------------ what was given


def _checked(also: Mapping[str, Any] | None) -> dict[str, Any]:
    if also is None:
        return {}
    if not isinstance(also, Mapping):
        raise BadInput(
            f"also is a {type(also).__name__}, but it must name what else to save, "
            'as in also={"scheduler": scheduler}'
        )
    for name, thing in also.items():
        if type(name) is not str:
            raise BadInput(f"also has the key {name!r}, but its keys must be text")
        lacks = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(thing, method, None))]
        if lacks:
            raise BadInput(f"also[{name!r}] is a {type(thing).__name__}, which has no {lacks[0]}(); it cannot be saved")
    return dict(also)


def _path(folder: Any) -> Path:
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise BadInput(f"checkpoint is {folder!r}, but it must be the name of a folder")
    return Path(folder)


def _check_writable(folder: Path) -> None:
    trial = folder / f".writable-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as fault:
        raise BadInput(
            f"checkpoints cannot be written into {str(folder)!r} ({fault.strerror or fault}); "
            "give checkpoint= a folder that process 0 can write into"
        ) from fault


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))


# ------------------------------------------------------------ states


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _plain(value: Any) -> Any:
    """The same with plain dicts: modules have ordered ones, MultiStepLR counts in a Counter."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value.detach() if isinstance(value, nn.Parameter) else value


def _like(value: Any, here: Any) -> Any:
    """A loaded value, with the kinds of dict that stand in the same place here."""
    if isinstance(value, dict) and isinstance(here, dict):
        items = {key: _like(item, here.get(key)) for key, item in value.items()}
        if type(here) is OrderedDict:  # of a module; it carries the versions of its layers
            made = OrderedDict(items)
            made.__dict__.update(here.__dict__)
            return made
        return Counter(items) if type(here) is Counter else items
    if isinstance(value, list) and isinstance(here, list) and len(value) == len(here):
        return [_like(*pair) for pair in zip(value, here, strict=True)]
    return value


class _Copies:
    """Copies of tensors in main memory; the memory is used again for the next checkpoint."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._is_on_gpu = False

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with all its tensors copied; complete on return."""
        self._is_on_gpu = False
        before, self._kept = self._kept, {}
        copied: dict[str, Any] = self._copied(_plain(state), "", before)
        if self._is_on_gpu:
            torch.cuda.synchronize()
        return copied

    def _copied(self, value: Any, path: str, before: dict[str, Tensor]) -> Any:
        if isinstance(value, dict):
            return {key: self._copied(item, f"{path}.{key}", before) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(item, f"{path}.{index}", before) for index, item in enumerate(value))
        if type(value) is not Tensor:
            return value
        if value.layout != torch.strided or value.is_quantized:
            return value.detach().clone()  # refused where it is written, with its place
        kept = before.get(path)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        self._kept[path] = kept.copy_(value.detach(), non_blocking=value.is_cuda)
        self._is_on_gpu |= value.is_cuda
        return kept
