"""The run as worker 0 sees it: who made each version is decided, or written down, in a thread of its own."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

from quorate.coordinator import Coordinator
from quorate.engines.base import Job
from quorate.engines.collective.control import Hub
from quorate.engines.collective.judged import Judged
from quorate.errors import BadInput, ProcessLost, QuorateError
from quorate.events import Apply
from quorate.learner import Learning
from quorate.ledger import Ledger
from quorate.metrics import Metrics
from quorate.outfolder import SUMMARY_FILE, OutFolder
from quorate.policies import Policy
from quorate.replaying import RECORDED
from quorate.running import VERSION
from quorate.trace import TRACE_FILE, Recorder

#: Why a run ends that was closed before its processes had finished.
CLOSED = "closed"

_LAST_WORDS_S = 5.0


class Judge:
    """Runs a policy for the processes around a hub, and writes the trace.

    decides: whether the processes wait for the decisions. Otherwise they make every version of everybody's gradients
        by themselves, and what happens is only written down.
    ledger: who has which batch; an endless one where the script has a sampler of its own.
    out: the folder for the trace and the summary (None: none is written).
    overwrite: whether a trace in that folder may be replaced, as after a restart by torchrun.
    first_version: what the processes call this run's version 0, where they go on from a checkpoint.
    describe: what the trace's header says of the engine, e.g. {"backend": "gloo"}.
    recorders: told of everything that happens, in the judge's thread.
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
        overwrite: bool = False,
        first_version: int = 0,
        parameter_bytes: int = 0,
        describe: dict[str, Any] | None = None,
        recorders: tuple[Recorder, ...] = (),
    ) -> None:
        self._hub = hub
        self._engine = Judged(
            workers,
            hub.inbox,
            hub.broadcast,
            decides=decides,
            first_version=first_version,
            parameter_bytes=parameter_bytes,
            describe=describe,
            on_record=self._record,
        )
        self._engine.check(policy)
        self._folder = None if out is None else _TraceFolder(out, overwrite)
        self.metrics = Metrics()
        self.error: QuorateError | None = None
        self.why_over: str | None = None
        self._job = Job(task=None, policy=policy, ledger=ledger, learning=Learning(), seed=ledger.seed)
        self._watchers: list[Recorder] = [self.metrics, *recorders]
        self._thread = threading.Thread(target=self._run, name="quorate-judge", daemon=True)
        self._is_closed = False
        self._spending = threading.Condition()
        self._ledger_after: tuple[int, dict[str, Any]] = (first_version, ledger.state())

    def start(self) -> None:
        """Begin: all workers count as there, and time runs from now."""
        if self._folder is not None:
            self._watchers.append(self._folder.make(self._watchers))
        self._engine.open(self._job)
        for watcher in self._watchers:
            watcher.run(self._header())
        self._thread.start()

    def version_made(self, version: int, seconds: float) -> None:
        """This process has made a version, which took it so long; called by the data plane, from any thread."""
        self._engine.version_made(version, seconds)

    def ledger_after(self, version: int) -> dict[str, Any] | None:
        """The ledger once a version's batches are spent, for its checkpoint; None if that does not come to pass.

        For the thread that has just made the version: the next one is not made before it goes on.
        """
        with self._spending:
            self._spending.wait_for(lambda: self._ledger_after[0] >= version, _LAST_WORDS_S)
            known, state = self._ledger_after
        return state if known == version else None

    def _spent(self, version: int, time: float, loss: float | None) -> None:
        with self._spending:
            self._ledger_after = version + self._engine.first_version, self._job.ledger.state()
            self._spending.notify_all()

    def close(self, wait_s: float = _LAST_WORDS_S) -> None:
        """Write the end of the trace and the summary, once the run is over, or this time; safe to call twice.

        A process may close when it has finished itself, while the others' last words are still on their way.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.ident is not None:
            self._thread.join(wait_s)
            self._engine.end(CLOSED)
            self._thread.join()
        for watcher in self._watchers:
            watcher.close()
        if self._folder is not None and self.why_over is not None:
            self._folder.finish(self.metrics.summary())

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        coordinator = _Coordinator(
            self._job.policy,
            self._engine,
            self._job.ledger,
            self._watchers,
            workers=self._engine.workers,
            after_update=self._spent,
            patience_s=math.inf,  # who is silent for too long, the hub knows
            stop=self._engine.ending,
        )
        try:
            time = coordinator.run()
        except ProcessLost as lost:  # everybody has been told; the trace breaks off, as the run does
            self.error = lost
        except QuorateError as error:
            self.error = error
            self._hub.lose(0, f"worker 0 has ended the run: {error}")
        except Exception as error:
            self._hub.lose(0, f"worker 0 failed ({type(error).__name__}: {error})")
            raise
        else:
            for watcher in self._watchers:
                watcher.ended(time, coordinator.version, coordinator.why_over, None)
            self.why_over = coordinator.why_over

    def _record(self, time: float, version: int, measures: dict[str, float]) -> None:
        for watcher in self._watchers:
            watcher.evaluated(time, version, measures)

    def _header(self) -> dict[str, Any]:
        policy, ledger = self._job.policy, self._job.ledger
        return {
            "quorate": VERSION,
            "policy": {"name": policy.name, **policy.options()},
            "engine": self._engine.describe(),
            "task": None,
            "workers": self._engine.workers,
            "seed": ledger.seed,
            "samples": ledger.samples,
            "batch_size": ledger.batch_size,
            "batches": RECORDED,  # processes took them when they needed them
            "learning": self._job.learning.options(),
            "first_version": self._engine.first_version,
            "updates": None,
            "epochs": ledger.epochs,
            "until": None,
            "evaluate_every": 1,
            "parameter_bytes": self._engine.parameter_bytes(),
        }


class _Coordinator(Coordinator):
    """Says why a version is made before it is: the processes are told."""

    def _apply(self, time: float, action: Apply) -> float:
        assert isinstance(self._engine, Judged)
        self._engine.reason = action.reason
        return super()._apply(time, action)


class _TraceFolder(OutFolder):
    """Where the trace and the summary go. There may be checkpoints of the script beside them."""

    def __init__(self, path: Path, overwrite: bool) -> None:
        self.path, self._made = path, not path.exists()
        if path.exists() and not path.is_dir():
            raise BadInput(f"the folder for the trace is {str(path)!r}, which is a file; name a folder")
        for name in (TRACE_FILE, SUMMARY_FILE):
            if not (path / name).exists():
                continue
            if not overwrite:
                raise BadInput(f"the folder {str(path)!r} already holds a run ({name}); name another, or move it away")
            try:
                (path / name).unlink()
            except OSError as error:
                raise self._cannot_write(error) from error
