"""The local engine: worker processes on this machine, with parameters and gradients in shared memory."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from quorate.engines.base import Job
from quorate.engines.local import worker
from quorate.engines.local.fork_server import WorkerProcesses
from quorate.engines.local.versions import LocalVersions
from quorate.engines.local.workers import LocalWorkers
from quorate.engines.shared.compute import checked_device
from quorate.engines.shared.order_book import Loss
from quorate.engines.shared.real_time import LiveEngine, LiveRun, check_faults
from quorate.engines.shared.shared_memory import (
    WIRES,
    BlockLayout,
    Blocks,
    BlockStore,
    ControlWords,
    anonymous_file,
    available_bytes,
    gigabytes,
)
from quorate.engines.shared.task_transfer import write_job
from quorate.engines.shared.update import KEPT, KEPT_HALF, finds_nan_early
from quorate.errors import BadInput, check_at_least
from quorate.faults import Faults, parse_faults
from quorate.latency import Latency, parse_latency
from quorate.learner import Learner
from quorate.machine import core_wait_s, machine
from quorate.schema import MOST_THREADS, MOST_WORKERS

#: Memory of a worker process besides its blocks and the task's data. Measured: a fork takes 9 to 15 MB.
WORKER_BYTES = 20_000_000


class Local(LiveEngine):
    """Worker processes on this machine.

    workers: the number of workers.
    threads: torch threads in each worker.
    device: where workers compute: "cpu", "cuda" (GPUs in turn), or one GPU for all workers, such as "cuda:0".
    latency: an artificial delay before each ticket, as a model or its text form; drawn as in the simulator.
    faults: a script of times at which worker processes are killed, or its text form. Killed workers are restarted.
    wire: format of gradients in shared memory: "fp32", or "bf16" for half the bytes.
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
        self.workers = check_at_least("workers", workers, 1, MOST_WORKERS)
        self.threads = check_at_least("threads", threads, 1, MOST_THREADS)
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
            "arithmetic": KEPT if self.wire == "fp32" else KEPT_HALF,
        }

    def header(self) -> dict[str, Any]:
        return {"machine": machine(self.workers)}

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

    def core_waits(self) -> dict[int, float]:
        waits = {pid: core_wait_s(pid) for pid in self.processes().values()}
        return {pid: wait_s for pid, wait_s in waits.items() if wait_s is not None}

    def processes(self) -> dict[int, int]:
        """The process number of each running worker."""
        return self._run.workers.pids()


class _Open:
    """One run of the engine, from open to close."""

    def __init__(self, engine: Local, job: Job, to_close: ExitStack) -> None:
        assert job.task is not None
        self._engine, self._job = engine, job
        self.to_close = ExitStack()  # filled by `Local.open` when everything is open
        blocks, words, description = (_anonymous(name, to_close) for name in ("blocks", "control", "job"))
        self.learner = Learner(job.task, job.learning, job.seed, torch.device("cpu"))
        layout = BlockLayout(self.learner.model, engine.wire)
        self._check_room(layout.nbytes)
        os.ftruncate(words, ControlWords.size(engine.workers))
        # The fork server imports torch in the meantime; workers are forked when the job is written.
        pool = WorkerProcesses(blocks, words, description)
        to_close.callback(pool.close)
        control = ControlWords(words, engine.workers)
        to_close.callback(control.close)
        self.workers = LocalWorkers(engine.workers, pool, control, job.patience_s)
        to_close.callback(self.workers.close)
        self._store = BlockStore(layout, Blocks(blocks, layout.nbytes))
        to_close.callback(self._store.close)
        self.updater = LocalVersions(job, self.learner, layout, self._store, engine.workers, engine.threads)
        to_close.callback(self.updater.close)
        write_job(description, job.task, self._describe_job(layout))
        self.live = LiveRun(
            job, engine.workers, self.workers, self._store, self.updater, latency=engine.latency, faults=engine.faults
        )

    def _check_room(self, block_bytes: int) -> None:
        """Refuse a run that does not fit into memory, before any process starts."""
        workers, policy = self._engine.workers, self._job.policy
        # A synchronous policy keeps two versions alive; under others, each worker may read another version.
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
        devices = [str(engine.device)]
        if engine.device.type == "cuda" and engine.device.index is None:  # GPUs in turn
            devices = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        return {
            "workers": engine.workers,
            "threads": engine.threads,
            "devices": devices,
            "wire": engine.wire,
            "block_bytes": layout.nbytes,
            "batch_size": job.ledger.batch_size,
            "samples": job.ledger.samples,
            "seed": job.seed,
            "look_through": finds_nan_early(job.policy),
        }

    def start(self) -> None:
        """Start all workers, wait until they are ready, and start the clock."""
        for number in range(self._engine.workers):
            self.workers.start(number)
        ready: set[int] = set()
        while len(ready) < self._engine.workers:
            if self._job.stop is not None and self._job.stop.reason is not None:
                raise KeyboardInterrupt
            for happening in self.workers.wait(None):
                if isinstance(happening, int):
                    ready.add(happening)
                elif isinstance(happening, Loss):
                    ready.discard(happening.worker)
        self.live.begin_time(sorted(ready))


def _anonymous(name: str, to_close: ExitStack) -> int:
    descriptor = anonymous_file(f"quorate-{name}")
    to_close.callback(os.close, descriptor)
    return descriptor
