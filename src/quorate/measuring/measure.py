"""`quorate.measure`: two lines in a training script that write a table of step times for `quorate plan`.

Processes send their rows through the key-value store of the process group, as plain bytes of doubles, never pickled.
Process 0 writes the table and reports whether it is complete.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
import warnings
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import nn

from quorate.errors import BadInput
from quorate.machine import core_wait_s, cores
from quorate.measuring.hooks import COLUMNS, WIDTH, StepHooks, clock_for

_CHUNK_BYTES = 1 << 19  # the store limits messages to some megabytes
_GONE, _WHOLE, _PARTS = b"gone", b"whole", b"parts"
_ACKNOWLEDGE_S = 20.0  # process 0 may host the store, so it waits for the others to read its verdict


class ProcessPlace:
    """Rank of this process and number of processes."""

    def __init__(self, worker: int, workers: int) -> None:
        self.worker, self.workers = worker, workers
        self.local_workers = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # on this machine, set by torchrun

    @classmethod
    def here(cls) -> ProcessPlace:
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        # torchrun sets these variables also where the script has no process group (yet).
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))


class TableExchange:
    """Gathers the rows of all processes in process 0 at the end of a measured block."""

    def __init__(self, name: str, place: ProcessPlace, wait_s: float) -> None:
        self._name, self._place = name, place
        self._until = time.monotonic() + wait_s

    def send(self, seconds: array[float]) -> None:
        store = self._store()
        data = seconds.tobytes()
        chunks = [data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES)]
        for number, chunk in enumerate(chunks):
            store.set(f"{self._place.worker}/{number}", chunk)
        store.set(f"{self._place.worker}", str(len(chunks)))

    def receive(self, worker: int) -> array[float]:
        store = self._store()
        header = self._wait_for(store, f"{worker}")
        if header == _GONE:
            raise RuntimeError(f"process {worker} left the block with an error")
        rows = array("d")
        for number in range(int(header)):
            rows.frombytes(store.get(f"{worker}/{number}"))
        return rows

    def announce(self, whole: bool) -> None:
        """Process 0 publishes whether the table is complete, and waits until the others have read it."""
        with suppress(RuntimeError, ValueError):
            store = self._store()
            store.set("verdict", _WHOLE if whole else _PARTS)
            if whole:
                acknowledged = [f"{worker}/heard" for worker in range(1, self._place.workers)]
                store.wait(acknowledged, timedelta(seconds=_ACKNOWLEDGE_S))

    def table_is_whole(self) -> bool:
        """Wait for the verdict of process 0 and acknowledge it."""
        store = self._store()
        whole = self._wait_for(store, "verdict") == _WHOLE
        store.set(f"{self._place.worker}/heard", b"")
        return whole

    def abandon(self) -> None:
        """Tell the other processes not to wait for this one, which leaves with an error."""
        with suppress(RuntimeError, ValueError):
            store = self._store()
            store.set(f"{self._place.worker}", _GONE)
            if self._place.worker == 0:
                store.set("verdict", _PARTS)

    def _wait_for(self, store: Any, key: str) -> bytes:
        store.wait([key], timedelta(seconds=max(0.01, self._until - time.monotonic())))
        value: bytes = store.get(key)
        return value

    def _store(self) -> Any:
        if not dist.is_initialized():
            raise RuntimeError("there is no process group any more")
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        return PrefixStore(self._name, _get_default_store())


def as_lines(rows: Sequence[array[float]], workers: Sequence[int]) -> Iterator[str]:
    """The table's lines, by step, then by worker. Steps that could not be measured are left out.

    The first two values of a worker's array are the share of its time that it waited for a core, and its cores.
    """
    yield f"step,worker,{','.join(COLUMNS)},core_wait,cores\n"
    ends = [",".join(["", *map(_cell, one[:2])]) for one in rows]
    for step in range(max((len(one) // WIDTH for one in rows), default=0)):
        place = 2 + step * WIDTH
        for worker, values, end in zip(workers, rows, ends, strict=True):
            if place < len(values) and values[place] == values[place]:
                yield f"{step},{worker},{','.join(map(_cell, values[place : place + WIDTH]))}{end}\n"


def _cell(value: float) -> str:
    return f"{value:.9g}" if value == value else ""


_blocks_of: Counter[str] = Counter()  # measured blocks of this process by path, so that each has its own store keys


def measure(path: str | Path, model: nn.Module, *, overwrite: bool = False, wait_s: float = 300.0) -> Measuring:
    """Write every process's own seconds per step, without the time it waits for the others, to a CSV file.

        with quorate.measure("times.csv", model):
            for batch in loader:
                ...

    path: the file to write, with columns step, worker, seconds and more (docs/measuring.md); a worker is a rank.
    model: the model as the training loop calls it, including a DistributedDataParallel wrapper.
    overwrite: replace an existing file.
    wait_s: timeout for the other processes' rows at the end; after it each process writes its own file.
    """
    return Measuring(Path(path), model, overwrite, wait_s)


class Measuring:
    """A block of a training script whose steps are timed."""

    def __init__(self, path: Path, model: nn.Module, overwrite: bool, wait_s: float) -> None:
        _check_model(model)
        if not 0 <= wait_s < 1e6:
            raise BadInput(f"wait_s is {wait_s!r}, but it must be seconds, 0 or more")
        self._path, self._wait_s = path, wait_s
        self._place = ProcessPlace.here()
        self._check_path(overwrite)
        self._clock = clock_for(next(one.device for one in model.parameters() if one.requires_grad))
        self._hooks = StepHooks(model, self._clock)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude work that is not part of training, such as an evaluation between two epochs."""
        self._hooks.pause()
        try:
            yield
        finally:
            self._hooks.resume()

    def _core_wait(self, steps: array[float]) -> tuple[float, float]:
        """The share of its time that this process waited for a core, and the number of cores per process."""
        cores_each = cores() / self._place.local_workers
        waited_s = core_wait_s("thread-self")
        own_and_waiting = (steps[column::WIDTH] for column in (0, WIDTH - 1))
        total_s = sum(one for column in own_and_waiting for one in column if one == one)
        if waited_s is None or self._waited_s is None or not total_s:
            return math.nan, cores_each
        return min(1.0, (waited_s - self._waited_s) / total_s), cores_each

    def __enter__(self) -> Self:
        self._waited_s = core_wait_s("thread-self")
        self._hooks.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the table. This must not raise: the training is done, and the rest of the script must still run."""
        self._hooks.detach()
        try:
            steps = self._clock.finish()
        except RuntimeError:  # the device failed; `error` reports it
            steps = array("d")
        seconds = array("d", [*self._core_wait(steps), *steps])
        name = f"quorate.measure/{self._path}/{_blocks_of[str(self._path)]}"
        _blocks_of[str(self._path)] += 1
        if not any(one == one for one in steps):
            _warn("no step was measured: no optimizer that holds the model's parameters made a step in the block")
        if self._place.workers == 1:
            self._write(self._path, [seconds], [self._place.worker])
            return
        exchange = TableExchange(name, self._place, self._wait_s)
        if kind is not None:
            exchange.abandon()
            self._write_part(seconds, "the block ended with an error")
            return
        try:
            exchange.send(seconds)
            if self._place.worker == 0:
                rows = [seconds, *(exchange.receive(worker) for worker in range(1, self._place.workers))]
                whole = self._write(self._path, rows, range(self._place.workers))
                exchange.announce(whole)
            else:
                whole = exchange.table_is_whole()
            if whole:
                with suppress(OSError):
                    self._part.unlink(missing_ok=True)  # of an earlier run
            else:
                self._write_part(seconds, "process 0 could not write the whole table")
        except (RuntimeError, ValueError) as problem:  # the store is gone, or its wait timed out
            if self._place.worker == 0:
                exchange.announce(whole=False)
            first_line = (str(problem).strip() or type(problem).__name__).splitlines()[0]
            self._write_part(seconds, f"not all processes came to the end of the block ({first_line[:100]})")

    @property
    def _part(self) -> Path:
        return self._path.with_name(f"{self._path.stem}.worker{self._place.worker}{self._path.suffix}")

    def _check_path(self, overwrite: bool) -> None:
        """Check now, not after hours of training, that the table can be written."""
        for path in (self._path, self._part):
            if path.is_dir():
                raise BadInput(f"{str(path)!r} is a folder; name a file for the step times, such as times.csv")
            if path.exists() and not overwrite:
                raise BadInput(f"the file {str(path)!r} is already there; name another, or give overwrite=True")
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"the folder {str(folder)!r} cannot be made: {error.strerror}; name another") from error
        if not os.access(folder, os.W_OK):
            raise BadInput(f"the folder {str(folder)!r} cannot be written; name another for the step times")

    def _write_part(self, seconds: array[float], why: str) -> None:
        if self._write(self._part, [seconds], [self._place.worker]):
            _warn(f"{why}; the step times of worker {self._place.worker} are in {str(self._part)!r}")

    def _write(self, path: Path, rows: Sequence[array[float]], workers: Sequence[int]) -> bool:
        """Write the file atomically; returns False, with a warning, if that fails."""
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8", newline=""
            ) as file:
                temporary = Path(file.name)
                file.writelines(as_lines(rows, workers))
            mask = os.umask(0)  # temporary files are private; the table gets the usual permissions
            os.umask(mask)
            temporary.chmod(0o666 & ~mask)
            temporary.replace(path)
            return True
        except OSError as error:
            _warn(f"the step times cannot be written to {str(path)!r}: {error.strerror}")
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            return False


def _warn(sentence: str) -> None:
    warnings.warn(f"quorate.measure: {sentence}", stacklevel=4)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise BadInput(f"model is {type(model).__name__}, but it must be the nn.Module that is trained")
    if not any(one.requires_grad for one in model.parameters()):
        raise BadInput("no parameter of the model requires a gradient, so there are no training steps to measure")
    fsdp = sys.modules.get("torch.distributed.fsdp")  # every sharded model has imported it
    sharded = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    if any(isinstance(one, sharded) for one in model.modules()):
        raise BadInput(
            "the model is sharded (FSDP): its workers wait for each other inside forward and backward, so a process "
            "has no step time of its own; measure the same model under DistributedDataParallel or in one process"
        )
