"""Real worker processes on this machine, with parameters and gradients in memory that all of them share."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from quorate.engines._in_process import checked_device
from quorate.engines._kept import HALF, Kept, finds_nan_early
from quorate.engines.base import Job
from quorate.engines.local import worker
from quorate.engines.local.crew import Crew
from quorate.engines.local.pool import Pool
from quorate.engines.local.sending import write_job
from quorate.engines.local.store import Store
from quorate.engines.local.updating import Updater
from quorate.engines.processes.live import LiveRun, Loss, check_faults
from quorate.engines.processes.live_engine import LiveEngine
from quorate.engines.processes.memory import (
    WIRES,
    BlockLayout,
    Blocks,
    Control,
    anonymous_file,
    available_bytes,
    gigabytes,
)
from quorate.errors import BadInput, check_at_least
from quorate.faults import Faults, parse_faults
from quorate.latency import Latency, parse_latency
from quorate.learner import Learner

#: What a worker process takes beside its blocks and the task's own data: a fork of the template, measured 9 to 15 MB.
WORKER_BYTES = 20_000_000


class Local(LiveEngine):
    """Worker processes on this machine.

    workers: how many.
    threads: threads inside torch, in each worker.
    device: where workers compute: "cpu", "cuda" (all GPUs in turn), or one such as "cuda:0" for all.
    latency: an artificial delay before each ticket, as a model or its text form; drawn as the simulator draws it.
    faults: when workers are killed, as a script or its text form; killed for real. They come back by themselves.
    wire: how gradients are stored on their way: "fp32" as they are, or "bf16", half the bytes.
    """

    name = "local"
    keeps_checkpoints = True

    def __init__(
        self,
        workers: int,
        *,
        threads: int = 1,
        device: str = "cpu",
        latency: Latency | str | None = None,
        faults: Faults | str | None = None,
        wire: str = "fp32",
    ) -> None:
        self.workers = check_at_least("workers", workers, 1)
        self.threads = check_at_least("threads", threads, 1)
        self.device = checked_device(device)
        self.latency = parse_latency(latency) if isinstance(latency, str) else latency
        self.faults = parse_faults(faults) if isinstance(faults, str) else faults
        check_faults(self.name, self.faults, workers)
        if wire not in WIRES:
            raise BadInput(f"wire is {wire!r}, but gradients can be stored as one of: {', '.join(WIRES)}")
        self.wire = wire
        self._open: _Open | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "threads": self.threads,
            "device": str(self.device),
            "latency": None if self.latency is None else self.latency.text(),
            "faults": None if self.faults is None else self.faults.source,
            "wire": self.wire,
            "arithmetic": Kept.arithmetic if self.wire == "fp32" else HALF,
        }

    # ------------------------------------------------------------ opening and closing

    def open(self, job: Job) -> None:
        if not sys.platform.startswith("linux"):
            raise BadInput("the local engine needs Linux (memfd, epoll); elsewhere use the simulated engine")
        if worker.in_worker_process:
            raise BadInput(
                "the script starts a run when a worker process imports it; "
                'put what starts the run under: if __name__ == "__main__":'
            )
        self._check_job(job)
        self._saved_random_state = torch.get_rng_state()
        with ExitStack() as to_close:
            self._open = _Open(self, job, to_close)
            self._open.start()
            self._open.to_close = to_close.pop_all()

    def close(self) -> None:
        was_open = self._open is not None
        super().close()
        if was_open:
            torch.set_rng_state(self._saved_random_state)

    @property
    def _run(self) -> _Open:
        assert self._open is not None, "the engine is not open"
        return self._open

    # ------------------------------------------------------------ the model

    def evaluate(self) -> dict[str, float]:
        return self._run.updater.evaluate()

    def parameters(self) -> dict[str, Tensor]:
        return self._run.learner.state_dict()

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        return self._run.learner.average_dict()

    def parameter_bytes(self) -> int:
        return self._run.learner.nbytes

    def state(self) -> dict[str, Any]:
        return {**self._run.updater.state(), "steps": list(self._run.live.steps)}

    def restore(self, state: dict[str, Any], time: float) -> None:
        self._run.updater.restore(state)
        self._run.live.steps[:] = state["steps"]
        self._run.live.set_clock(time)

    def processes(self) -> dict[int, int]:
        """The process number of each worker that has one; for tests and for the curious."""
        return self._run.crew.pids()


class _Open:
    """One run of the engine, from open to close."""

    def __init__(self, engine: Local, job: Job, to_close: ExitStack) -> None:
        assert job.task is not None
        self._engine, self._job = engine, job
        self.to_close = ExitStack()  # once open: what to give back at the end, last first
        blocks, words, description = (_anonymous(name, to_close) for name in ("blocks", "control", "job"))
        self.learner = Learner(job.task, job.learning, job.seed, torch.device("cpu"))
        layout = BlockLayout(self.learner.model, engine.wire)
        self._check_room(layout.nbytes)
        os.ftruncate(words, Control.size(engine.workers))
        # The template imports torch while we go on; workers are forked once the job is written.
        pool = Pool(blocks, words, description)
        to_close.callback(pool.close)
        control = Control(words, engine.workers)
        to_close.callback(control.close)
        self.crew = Crew(engine.workers, pool, control)
        to_close.callback(self.crew.close)
        self._store = Store(layout, Blocks(blocks, layout.nbytes))
        to_close.callback(self._store.close)
        self.updater = Updater(job, self.learner, layout, self._store, engine.workers, engine.threads)
        to_close.callback(self.updater.close)
        write_job(description, job.task, self._describe_job(layout))
        self.live = LiveRun(
            job,
            engine.workers,
            self.crew,
            self._store,
            self.updater,
            latency=engine.latency,
            faults=engine.faults,
        )

    def _check_room(self, block_bytes: int) -> None:
        """Refuse what cannot fit before anything is started."""
        workers, policy = self._engine.workers, self._job.policy
        # Under a synchronous policy two versions are alive; else every worker may hold one of its own.
        fixed, held = (2, 0) if policy.staleness_bound == 0 else (1 + policy.history, 1)
        versions = fixed + held * workers
        each = (1 + held) * block_bytes + WORKER_BYTES
        needed = fixed * block_bytes + workers * each
        free = available_bytes()
        if free is not None and needed > free:
            fits = max(0, (free - fixed * block_bytes) // each)
            raise BadInput(
                f"{workers} workers need about {gigabytes(needed)} of memory (each a gradient of "
                f"{gigabytes(block_bytes)} and {gigabytes(WORKER_BYTES)} for its process; {versions} versions of the "
                f"parameters), but only {gigabytes(free)} are free; take at most {fits}"
            )

    def _describe_job(self, layout: BlockLayout) -> dict[str, Any]:
        engine, job = self._engine, self._job
        assert job.task is not None
        return {
            "workers": engine.workers,
            "threads": engine.threads,
            "devices": _devices(engine.device),
            "wire": engine.wire,
            "block_bytes": layout.nbytes,
            "batch_size": job.ledger.batch_size,
            "samples": job.ledger.samples,
            "seed": job.seed,
            "look_through": finds_nan_early(job.policy),
        }

    def start(self) -> None:
        """Wait until every worker is there; time begins then."""
        for number in range(self._engine.workers):
            self.crew.start(number)
        ready: set[int] = set()
        while len(ready) < self._engine.workers:
            if self._job.stop is not None and self._job.stop.reason is not None:
                raise KeyboardInterrupt
            for happening in self.crew.wait(None):
                if isinstance(happening, int):
                    ready.add(happening)
                elif isinstance(happening, Loss):
                    ready.discard(happening.worker)
        self.live.begin_time(sorted(ready))


def _anonymous(name: str, to_close: ExitStack) -> int:
    descriptor = anonymous_file(f"quorate-{name}")
    to_close.callback(os.close, descriptor)
    return descriptor


def _devices(device: torch.device) -> list[str]:
    """Where workers compute, in turn."""
    if device.type == "cuda" and device.index is None:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [str(device)]
