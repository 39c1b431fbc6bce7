"""Checkpoints of a `DataParallel` run: their content, when they are taken, and how a run is restored from one.

`reached` notes a version when `optimizer.step()` has made it; `take` copies it when the next iteration begins. In
between a script steps its LR scheduler, its GradScaler and its averaged model, which belong to the version. Worker 0
writes the copy in a thread while the next iteration is computed, and waits for the disk before the next version is made
(`settle`). So at most one version is made beyond the last saved one.

Worker 0 writes the checkpoint, but every process draws its own dropout and augmentation. So every process writes its
random state to a small file of its own, without communication:

checkpoints/random/00003-00000007.json      worker 3, version 7
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quorate.checkpoint import BackgroundWriter, CheckpointFolder, Loaded, check_can_save, check_same_tensors
from quorate.checkpoint_schedule import warn
from quorate.data_parallel.plane import Plane
from quorate.errors import BadInput, check_at_least
from quorate.tensor_state import find_safetensors


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def plain(value: Any, leaf: Callable[[Any, str], Any] = lambda value, _: value, path: str = "") -> Any:
    """The same value with plain dicts: modules have an OrderedDict, MultiStepLR has a Counter.

    leaf: called with each value that is no dict, list or tuple, and its path; returns its replacement.
    """
    if isinstance(value, dict):
        return {key: plain(item, leaf, f"{path}.{key}") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item, leaf, f"{path}.{index}") for index, item in enumerate(value))
    return leaf(value.detach() if isinstance(value, nn.Parameter) else value, path)


def like(value: Any, here: Any) -> Any:
    """A loaded value, with the dict types of the corresponding current value `here`."""
    if isinstance(value, dict) and isinstance(here, dict):
        items = {key: like(item, here.get(key)) for key, item in value.items()}
        if type(here) is OrderedDict:  # of a module; its attribute `_metadata` has the versions of the layers
            made = OrderedDict(items)
            made.__dict__.update(here.__dict__)
            return made
        return Counter(items) if type(here) is Counter else items
    if isinstance(value, list) and isinstance(here, list) and len(value) == len(here):
        return [like(*pair) for pair in zip(value, here, strict=True)]
    return value


class Copies:
    """Copies of tensors in main memory, which is reused for the next checkpoint."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._is_on_gpu = False

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with all its tensors copied; the copies are complete on return."""
        self._is_on_gpu = False
        before, self._kept = self._kept, {}
        copied: dict[str, Any] = plain(state, partial(self._copied, before))
        if self._is_on_gpu:
            torch.cuda.synchronize()
        return copied

    def _copied(self, before: dict[str, Tensor], value: Any, path: str) -> Any:
        if type(value) is not Tensor:
            return value
        if value.layout != torch.strided or value.is_quantized:
            return value.detach().clone()  # the writer refuses it, and names its place
        kept = before.get(path)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        self._kept[path] = kept.copy_(value.detach(), non_blocking=value.is_cuda)
        self._is_on_gpu |= value.is_cuda
        return kept


#: Random states that each worker keeps. More than the two checkpoints: a worker may be ahead of worker 0.
KEPT = 4


def random_state() -> dict[str, Tensor]:
    """The random state of this process: of the CPU, and of the GPU that it uses, if any."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Restore a random state; a missing part, or the GPU's part without a GPU, changes nothing."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class RandomStateFiles:
    """The random states of one worker on disk. A file that cannot be written or read is skipped: only draws differ."""

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
        """The random state of this worker after that version; None if it is not known.

        A worker that died before it reached the version has only an earlier state, and repeats its draws from there.
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
        if not self._written:  # the files of the run before a restart
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


#: Keys of a `DataParallel` checkpoint, which one of `quorate.train` does not have.
CONTENT = ("model", "optimizer", "also", "random", "extra")
#: Seconds between checkpoints with fsync: a crash of the machine, not of a process, may cost so much training.
DURABLE_EVERY_S = 30.0


class _FailureWarning:
    """Reports only the first of several failed checkpoints in a row."""

    _has_warned = False

    def failed(self, sentence: str) -> None:
        if not self._has_warned:  # the disk may be full for hours: one line a version would be too many
            self._has_warned = True
            warn(f"{sentence} (checkpoints that fail after this one are not reported)")

    def saved(self, version: int) -> None:
        self._has_warned = False


class Saver:
    """The checkpoints of one script: constructed in every process, written by worker 0.

    folder: the checkpoints' folder; every process reads its own, on a shared disk or not.
    also: further objects that belong to a version, by name: a scheduler, a GradScaler, an averaged model.
    every: versions between two checkpoints, which is also the most that the death of a process can lose.
    durable_every_s: seconds between checkpoints that survive a crash of the machine (with fsync).
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
        check_can_save(plain(self._state()))  # fail now, not after an hour of training
        self.folder = _TimedFolder(path, durable_every_s)
        self._random_files = RandomStateFiles(self.folder.folder, worker)
        if self.writes:
            _check_writable(path)
            self.folder.sweep()
        warning = _FailureWarning()
        self._writer = BackgroundWriter(self.folder, warning.failed, warning.saved)
        self._copies = Copies()
        self._noted: tuple[int, dict[str, Any], dict[str, Tensor]] | None = None
        self._random: dict[str, Tensor] | None = None  # of the restored checkpoint, until the first batch
        self._last = 0  # the last version reached
        self._follows = False  # the thread that makes the versions saves them
        self._settling = threading.Lock()

    @property
    def writes(self) -> bool:
        """Whether this process writes the model; the other processes write only their random states."""
        return self.worker == 0

    # ------------------------------------------------------------ saving

    def is_due(self, version: int) -> bool:
        """Whether a version is to be saved; this process may have missed some versions before it."""
        return version // self.every > self._last // self.every

    def reached(self, version: int, extra: dict[str, Any] | None = None) -> None:
        """This process has made a version that is to be saved: note the state that will change before `take`.

        That is the random state, which the next batch may advance, and `extra` (the sampler's position).
        """
        if self._follows:
            return
        self._last = version
        self._note(version, dict(extra or {}), random_state())

    def _note(self, version: int, extra: dict[str, Any], random: dict[str, Tensor]) -> None:
        self._noted = version, extra, random
        if not self.writes:
            self._random_files.save(version, random)

    def handing_out(self) -> None:
        """The sampler hands out a batch: the current random state belongs to the last version reached.

        Since the step the script may have drawn random numbers, to evaluate or to create a data loader's iterator. A
        resumed run has created its own iterator, so it resets the random state to that of its checkpoint.
        """
        if self._random is not None:
            set_random_state(self._random)
            self._random = None
        elif self._noted is not None:
            version, extra, before = self._noted
            random = random_state()
            if any(not torch.equal(state, before[name]) for name, state in random.items() if name in before):
                self._note(version, extra, random)

    @property
    def is_waiting(self) -> bool:
        """Whether `reached` has noted a version that is not copied yet."""
        return self._noted is not None

    def take(self) -> None:
        """Copy the last version reached, unless it is saved; the copy is written while the script continues."""
        if self._noted is None:
            return
        (version, extra, random), self._noted = self._noted, None
        if self.writes:
            self._submit(version, {**self._state(), "random": random, "extra": extra})

    def follow(self, plane: Plane, extra: Callable[[int], dict[str, Any]]) -> None:
        """Save each version in the thread that makes it, instead of when the script begins the next iteration.

        Under a quorum, versions are made while this process is late, and the optimizer's state advances with them. The
        objects of `also` are then saved as the script has them at that moment.
        """
        if not self.writes:
            return
        self._follows = True

        def made(version: int, seconds: float) -> None:
            if self.is_due(version):
                self._last = version
                state = self._state({**plane.newest(), **plane.newest_buffers()})
                self._submit(version, {**state, "random": random_state(), "extra": extra(version)})

        plane.on_version.append(made)

    def _submit(self, version: int, state: dict[str, Any]) -> None:
        with self._settling:
            self._writer.finish()  # the copies' memory is reused, so the last checkpoint must be written
            self._writer.submit(version, self._copies.of(state))

    def save(self, version: int, extra: dict[str, Any] | None = None) -> None:
        """Save a version in its current state."""
        self._follows = False
        self.reached(version, extra)
        self.take()

    def settle(self) -> None:
        """Wait until the last checkpoint is written. To be called before the next version can be made."""
        with self._settling:  # called by the script's thread and the communication thread
            self._writer.finish()

    def close(self) -> None:
        """Save the last version reached, and wait for it."""
        self.take()
        self.settle()

    def _state(self, newest: Mapping[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """The state of a version.

        newest: newer values of the module's parameters and buffers.
        """
        optimizer, model = self._optimizer.state_dict(), self._module.state_dict()
        if newest is not None:
            everything = (self._module.named_parameters, self._module.named_buffers)
            for name, tensor in (pair for named in everything for pair in named(remove_duplicate=False)):
                if name in model and tensor in newest:
                    model[name] = newest[tensor].detach()
        return {
            "model": model,
            "optimizer": {"kind": type(self._optimizer).__name__, **optimizer},
            "also": {name: thing.state_dict() for name, thing in self._also.items()},
        }

    # ------------------------------------------------------------ restoring

    def restore(self, loaded: Loaded) -> dict[str, Any]:
        """Restore the state of a version, and return the `extra` that was saved with it.

        The whole checkpoint is checked first: one that does not fit changes nothing.
        """
        state = loaded.state
        if missing := [name for name in CONTENT if name not in state]:
            raise BadInput(
                f"the checkpoint of version {loaded.version} in {str(self.folder.folder)!r} has no {missing[0]}: "
                "it is not one of a DataParallel run; give checkpoint= another folder"
            )
        check_same_tensors(tensors_of(self._module.state_dict()), tensors_of(state["model"]), "model")
        saved = dict(state["optimizer"])
        self._check_optimizer(saved.pop("kind"), saved)
        self._check_also(state["also"])
        self._module.load_state_dict(like(state["model"], self._module.state_dict()))
        self._optimizer.load_state_dict(saved)
        for name, thing in self._also.items():
            thing.load_state_dict(like(state["also"][name], thing.state_dict()))
        self._random = state["random"] if self.worker == 0 else self._random_files.load(loaded.version)
        if self._random is not None:
            set_random_state(self._random)
        self._last = loaded.version
        extra: dict[str, Any] = state["extra"]
        if extra.get("between_epochs"):
            self._random = None  # saved before the next epoch's iterator was created; the script creates it again
        return extra

    def _check_optimizer(self, kind: str, saved: dict[str, Any]) -> None:
        here = self._optimizer.state_dict()["param_groups"]
        if kind != type(self._optimizer).__name__:
            raise BadInput(
                f"the checkpoint was made with the optimizer {kind}, but here it is {type(self._optimizer).__name__}; "
                "use the same, or give checkpoint= another folder"
            )
        sizes = [" and ".join(str(len(one["params"])) for one in groups) for groups in (saved["param_groups"], here)]
        if sizes[0] != sizes[1]:
            raise BadInput(
                f"the checkpoint is of an optimizer with other parameter groups: they have {sizes[0]} "
                f"parameters there, {sizes[1]} here"
            )

    def _check_also(self, saved: dict[str, Any]) -> None:
        for name in self._also.keys() - saved.keys():
            raise BadInput(f"also= names {name!r}, which is not in the checkpoint; leave it out, or start anew")
        for name in saved.keys() - self._also.keys():
            raise BadInput(f"the checkpoint has {name!r}, which also= does not name; add it, or start anew")


class _TimedFolder(CheckpointFolder):
    """Calls fsync at intervals only. The kernel writes the other checkpoints, which survive the death of a process."""

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


# ------------------------------------------------------------ checks of the arguments


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
