"""Tasks that misbehave, once or always, in a worker process or in the main process. Workers import them from here."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from quorate.engines.local import worker
from tests.toy_tasks import batch_norm_net, sgd, toy_data

SAMPLES, BATCH, BATCHES = 100, 8, 13
CHILD_S = 4.0  # how long a child outlives the worker that left it


def in_worker() -> bool:
    return worker.in_worker_process


class Mark:
    """A file that says that something happened; only one process can make it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __bool__(self) -> bool:
        return self.path.exists()

    def make(self) -> bool:
        """True for the one who made it."""
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
        return True

    @property
    def pid(self) -> int:
        return int(self.path.read_text())


@dataclass(frozen=True)
class Mishap:
    """One fault at one point of the protocol, when a certain sample comes by.

    where: "start" (of a worker), "load", "prefetch" (loading, by the thread that does it ahead), "forward",
    "backward", "answer" (the gradient is written, the answer not sent) or "apply".
    what: "kill", "segv", "raise", "surrogate" (raise, with a text that cannot be encoded), "stop" (for good), "pause"
    (stopped, and continued after a moment), "sleep" (for ever, and no CPU), "spin" (for ever, all of a core) or "fork"
    (leave a child, and be killed).
    mark: a file that is made when it happens, so that it happens once. None: it happens always.
    sample: the sample that must be in the batch. None: any.
    victim: the process it happens to; None: the one that meets it.
    after: a pattern of paths, one of which must be there first.
    """

    where: str
    what: str
    mark: str | None = None
    sample: int | None = 42
    victim: int | None = None
    after: str | None = None

    def meet(self, where: str, samples: list[int] | None = None) -> None:
        if where != self.where or not (samples is None or self.sample is None or self.sample in samples):
            return
        if self.after is not None and not any(Path(self.after).parent.glob(Path(self.after).name)):
            return
        if self.mark is None or Mark(self.mark).make():
            self.happen()

    def happen(self) -> None:
        if self.what == "raise":
            raise ArithmeticError(f"a mishap: {self.where}")
        if self.what == "surrogate":
            raise ArithmeticError("a mishap: \ud800")
        if self.what == "segv" and self.victim is None:
            ctypes.string_at(0)
        if self.what == "sleep":
            time.sleep(1000)
        while self.what == "spin":
            pass
        if self.what == "fork" and os.fork() == 0:
            Mark(f"{self.mark}-child").make()
            time.sleep(CHILD_S)
            os._exit(0)
        pid = os.getpid() if self.victim is None else self.victim
        if self.what == "pause" and self.victim is None:
            subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -CONT {pid}"], stderr=subprocess.DEVNULL)
        stopped, segv = self.what in ("stop", "pause"), self.what == "segv"
        os.kill(pid, signal.SIGSTOP if stopped else signal.SIGSEGV if segv else signal.SIGKILL)


class Numbered(Dataset[Any]):
    """Samples that say which they are."""

    def __init__(self, samples: int, mishaps: tuple[Mishap, ...] = (), seconds: float = 0.0) -> None:
        self.rows, self.mishaps, self.seconds = toy_data(samples), mishaps, seconds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        if self.seconds:
            time.sleep(self.seconds)
        if in_worker():
            ahead = threading.current_thread() is not threading.main_thread()
            for mishap in self.mishaps:
                mishap.meet("prefetch" if ahead else "load", [index])
        x, y = self.rows[index]
        return x, y, index


class Deadly(torch.optim.SGD):
    """An optimizer in whose step the main process meets its fate."""

    mishaps: tuple[Mishap, ...] = ()

    def step(self, closure: Any = None) -> Any:
        for mishap in self.mishaps:
            mishap.meet("apply")
        return super().step(closure)


class Disturbed:
    """A small net with BatchNorm, and mishaps."""

    batch_size = BATCH

    def __init__(self, *mishaps: Mishap, samples: int = SAMPLES, seconds: float = 0.0, load_s: float = 0.0) -> None:
        self.mishaps, self.seconds = mishaps, seconds
        self.data = Numbered(samples, mishaps, load_s)

    def model(self) -> nn.Module:
        if in_worker():
            self.meet("start")
        return batch_norm_net()

    def train_data(self) -> Numbered:
        return self.data

    def meet(self, where: str, samples: list[int] | None = None) -> None:
        for mishap in self.mishaps:
            mishap.meet(where, samples)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y, numbers = batch
        samples = numbers.tolist()
        if self.seconds:
            time.sleep(self.seconds)
        if in_worker():
            self.meet("forward", samples)
            Sending.before = lambda: self.meet("answer", samples)
        loss = functional.cross_entropy(model(x), y)
        if in_worker():
            loss.register_hook(lambda grad: self.meet("backward", samples))
        return loss

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        if not any(mishap.where == "apply" for mishap in self.mishaps):
            return sgd(params)
        optimizer = Deadly(params, lr=0.05, momentum=0.9)
        optimizer.mishaps = self.mishaps
        return optimizer

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        x, y = self.data.rows.tensors
        return {"accuracy": float((model(x).argmax(1) == y).float().mean())}


class Sending:
    """What a worker does when its gradient is written, before it says so. The product has no hook for it: a patch."""

    before: Any = staticmethod(lambda: None)
    real = worker.WorkerProcess._send

    def patched(self, answer: bytes) -> None:
        before, Sending.before = Sending.before, lambda: None
        before()
        Sending.real(self, answer)


worker.WorkerProcess._send = Sending.patched
