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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from quorate._tensor_state import find_safetensors
from quorate.checkpoint import BackgroundWriter, CheckpointFolder, Loaded, check_can_save, check_same_tensors
from quorate.checkpointing import warn
from quorate.engines.collective.plane import Plane
from quorate.errors import BadInput, check_at_least
from quorate.parallel.copying import Copies, like, plain, tensors_of
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
        check_can_save(plain(self._state()))  # rather now than after an hour
        self.folder = _TimedFolder(path, durable_every_s)
        self._randomness = Randomness(self.folder.folder, worker)
        if self.writes:
            _check_writable(path)
            self.folder.sweep()
        self._writer = BackgroundWriter(self.folder, self._failed, self._saved)
        self._copies = Copies()
        self._noted: tuple[int, dict[str, Any], dict[str, Tensor]] | None = None
        self._last = 0  # the version last reached
        self._follows = False  # versions are saved by the thread that makes them
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
        if self._follows:
            return
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
        self._submit(version, {**self._state(), "random": random, "extra": extra})

    def follow(self, plane: Plane, extra: Callable[[int], dict[str, Any]]) -> None:
        """Save each version where it is made, by the thread that makes it, instead of where the script begins the next.

        Where a quorum is enough, versions are made while this process is late, and the optimizer's state goes on with
        them. What `also` names is then as the script has it at that moment.
        """
        if not self.writes:
            return
        self._follows, then = True, plane.on_version

        def made(version: int, seconds: float) -> None:
            if then is not None:
                then(version, seconds)
            if self.is_due(version):
                self._last = version
                state = self._state({**plane.newest(), **plane.newest_buffers()})
                self._submit(version, {**state, "random": random_state(), "extra": extra(version)})

        plane.on_version = made

    def _submit(self, version: int, state: dict[str, Any]) -> None:
        with self._settling:
            self._writer.finish()  # one set of copies: the last one must be written before they are used again
            self._writer.submit(version, self._copies.of(state))

    def save(self, version: int, extra: dict[str, Any] | None = None) -> None:
        """Save a version as it is now."""
        self._follows = False
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

    def _state(self, newest: Mapping[Tensor, Tensor] | None = None) -> dict[str, Any]:
        """What belongs to a version.

        newest: parameters and buffers whose newest values are elsewhere.
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
        check_same_tensors(tensors_of(self._module.state_dict()), tensors_of(state["model"]), "model")
        saved = dict(state["optimizer"])
        self._check_optimizer(saved.pop("kind"), saved)
        self._check_also(state["also"])
        self._module.load_state_dict(like(state["model"], self._module.state_dict()))
        self._optimizer.load_state_dict(saved)
        for name, thing in self._also.items():
            thing.load_state_dict(like(state["also"][name], thing.state_dict()))
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
