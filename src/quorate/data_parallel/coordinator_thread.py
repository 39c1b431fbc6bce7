"""The coordinator in a thread of worker 0's process, and each process's end of the control plane."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quorate.checkpoint_schedule import warn
from quorate.data_parallel.control.hub import Hub
from quorate.data_parallel.control.link import HangWarning, Link
from quorate.data_parallel.engine import CollectiveEngine
from quorate.data_parallel.iterations import Iterations
from quorate.data_parallel.plane import Plane
from quorate.data_parallel.process_group import Checker, ProcessGroup
from quorate.data_parallel.sampler import Sampler
from quorate.engines.base import Job
from quorate.errors import ProcessLost, QuorateError
from quorate.learner import Learning
from quorate.ledger import Ledger
from quorate.metrics import Metrics
from quorate.out_folder import ScriptFolder
from quorate.policies import Policy
from quorate.run import RunRecord
from quorate.trace import Recorder

#: End reason of a run that was closed before its processes had finished.
CLOSED = "closed"

_WAIT_S = 5.0


class CoordinatorThread:
    """Runs a policy for the processes around a hub, and writes the trace.

    decides: whether the processes wait for the decisions. Otherwise they make every version from all gradients by
        themselves, and the coordinator only records.
    ledger: assigns batches to workers; an endless ledger if the script has its own sampler.
    out: the folder for the trace and the summary (None: neither is written).
    first_version: the processes' number for version 0 of this run; above 0 after a resume from a checkpoint.
    describe: fields of the engine in the trace's header, e.g. {"backend": "gloo"}.
    recorders: called with every event and decision, in the coordinator's thread.
    """

    def __init__(
        self,
        policy: Policy,
        workers: int,
        hub: Hub,
        *,
        decides: bool,
        ledger: Ledger,
        out: Path | None = None,
        first_version: int = 0,
        parameter_bytes: int = 0,
        describe: dict[str, Any] | None = None,
        recorders: tuple[Recorder, ...] = (),
    ) -> None:
        self._hub = hub
        self._record = RunRecord(recorders, None if out is None else ScriptFolder(out))
        self._engine = CollectiveEngine(
            workers,
            hub.inbox,
            hub.broadcast,
            decides=decides,
            first_version=first_version,
            parameter_bytes=parameter_bytes,
            describe=describe,
            on_record=self._record.evaluated,
        )
        self._engine.check(policy)
        self.error: QuorateError | None = None
        self._job = Job(task=None, policy=policy, ledger=ledger, learning=Learning(), seed=ledger.seed)
        self._thread = threading.Thread(target=self._run, name="quorate-coordinator", daemon=True)
        self._is_closed = False
        self._spending = threading.Condition()
        self._ledger_after: tuple[int, dict[str, Any]] = (first_version, ledger.state())

    @property
    def metrics(self) -> Metrics:
        return self._record.metrics

    def start(self) -> None:
        """Start the run: all workers count as joined, and its time starts now."""
        self._record.open()
        self._engine.open(self._job)
        limits = {"updates": None, "epochs": self._job.ledger.epochs, "until": None}
        self._record.begin(self._job, self._engine, limits, evaluate_every=1)
        self._thread.start()

    def version_made(self, version: int, seconds: float) -> None:
        """This process has made a version in this time; called by the data plane, from any thread."""
        self._engine.version_made(version, seconds)

    def ledger_after(self, version: int) -> dict[str, Any] | None:
        """The ledger's state after a version's batches are spent, for its checkpoint; None after a timeout.

        For the thread that has just made the version: the next version is not made until this thread continues.
        """
        with self._spending:
            self._spending.wait_for(lambda: self._ledger_after[0] >= version, _WAIT_S)
            known, state = self._ledger_after
        return state if known == version else None

    def _spent(self, version: int, time: float, loss: float | None) -> None:
        with self._spending:
            self._ledger_after = version + self._engine.first_version, self._job.ledger.state()
            self._spending.notify_all()

    def close(self, wait_s: float = _WAIT_S) -> None:
        """End the run if it is not over after `wait_s`, and close the trace; safe to call twice.

        The wait is for the last messages of the other processes: worker 0 may close as soon as it has finished itself.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.ident is not None:
            self._thread.join(wait_s)
            self._engine.end(CLOSED)
            self._thread.join()
        self._record.close()
        if self._record.folder is not None and self._record.folder.problem is not None:
            warn(self._record.folder.problem)

    def _run(self) -> None:
        coordinator = self._record.coordinator(
            self._job,
            self._engine,
            after_update=self._spent,
            patience_s=math.inf,  # the hub detects silent processes
            stop=self._engine.ending,
        )
        try:
            time = coordinator.run()
            if coordinator.why_over != CLOSED:
                self._engine.hear_last_measures()
            self._record.end(time, coordinator, self._engine, self._engine.digest())
        except ProcessLost as lost:  # all processes know; the trace has no end record, like any interrupted run
            self.error = lost
        except QuorateError as error:
            self.error = error
            self._hub.lose(0, f"worker 0 has ended the run: {error}")
        except Exception as error:
            self._hub.lose(0, f"worker 0 failed ({type(error).__name__}: {error})")
            raise


class ControlPlane:
    """This process's link to worker 0; in worker 0's process also the hub and the coordinator."""

    _link: Link
    _hub: Hub | None = None
    _coordinator: CoordinatorThread | None = None

    def connect(
        self,
        processes: ProcessGroup,
        heard: Callable[[dict[str, Any]], None],
        failed: Callable[[QuorateError], None],
        beat: Callable[[], None],
        patience_s: float,
    ) -> None:
        """Connect to the other processes; required before any send."""
        if processes.worker == 0:
            self._hub = Hub(processes.workers, patience_s=patience_s)
            self._hub.publish(processes.store)
        self._link = Link(processes.worker, processes.store, heard, failed, patience_s)
        self._link.on_beat = beat

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message to worker 0 without waiting."""
        self._link.send(kind, **fields)

    def tell(self, worker: int, message: dict[str, Any]) -> None:
        """Send a message to a worker; only in worker 0's process."""
        assert self._hub is not None
        self._hub.tell(worker, message)

    def start_coordinator(self, policy: Policy, ledger: Ledger, **options: Any) -> CoordinatorThread | None:
        """Start the coordinator if this is worker 0's process."""
        if self._hub is not None:
            self._coordinator = CoordinatorThread(policy, self._hub.workers, self._hub, ledger=ledger, **options)
            self._coordinator.start()
        return self._coordinator

    def ledger_after(self, version: int) -> dict[str, Any] | None:
        """The ledger's state after a version; None outside worker 0's process."""
        return None if self._coordinator is None else self._coordinator.ledger_after(version)

    def close(self) -> None:
        """Close at the normal end of a run: every process has sent `finished`."""
        self._link.close()
        if self._coordinator is not None:
            self._coordinator.close()
        if self._hub is not None:
            self._hub.close()


def folder_after_restarts(out: str | Path | None) -> Path | None:
    """The folder for the trace: after a restart by torchrun a new folder beside the first one."""
    if out is None:
        return None
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Path(f"{out}-restart{restarts}") if restarts else Path(out)


def extra_of_version(sampler: Sampler | None, control: ControlPlane | None, version: int) -> dict[str, Any]:
    """The sampler's and the ledger's state for a checkpoint. control: given if a quorum decides."""
    if sampler is None:
        return {}
    ledger = None if control is None else control.ledger_after(version)
    return {"sampler": sampler.state(), **({} if ledger is None else {"ledger": ledger})}


def pass_on(
    watch: HangWarning, checker: Checker, sampler: Sampler | None, driver: Iterations, message: dict[str, Any]
) -> None:
    """Pass a control message to its receivers."""
    watch.heard(message)
    if message["kind"] == "digest":
        checker.heard(message)
    if sampler is not None:
        sampler.heard(message)
    driver.heard(message)


def fail_all(plane: Plane, sampler: Sampler | None, error: QuorateError) -> None:
    plane.fail(error)
    if sampler is not None:
        sampler.failed(error)
