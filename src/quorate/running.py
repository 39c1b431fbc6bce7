"""One run from open to close: what training, resuming and replaying share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quorate.checkpoint import CheckpointFolder
from quorate.checkpointing import Checkpoints, checkpoints_of, warn
from quorate.coordinator import LIMIT_REACHED, Coordinator
from quorate.engines.base import Engine, Job
from quorate.errors import BadInput, LearnerLost, QuorumLost, WorkerFailed
from quorate.limits import Limits
from quorate.metrics import Metrics
from quorate.outfolder import PARAMETERS_FILE, OldFolder, OutFolder
from quorate.stopping import Stop
from quorate.trace import Recorder
from quorate.tracewriting import TraceWriter

DEFAULT_PATIENCE_S = 600.0
#: So often the learner may be lost at one version, without any progress in between.
STEPS_IN_VAIN = 10

try:
    VERSION = version("quorate")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0+unknown"


@dataclass(frozen=True)
class Progress:
    """How far a run is; what a progress bar shows."""

    updates: int
    seconds: float
    loss: float | None
    drop_rate: float
    share: float | None  # of the whole run, where that is known


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    metrics: Metrics
    parameters: dict[str, Tensor]
    averaged: dict[str, Tensor] | None = None
    out: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None  # the signal that ended it early

    @property
    def digest(self) -> str | None:
        """Fingerprint of the final parameters and buffers; None without gradients."""
        return self.metrics.digest

    @property
    def evaluation(self) -> dict[str, float]:
        """The task's measures of the last version."""
        return self.metrics.evaluations[-1].measures if self.metrics.evaluations else {}


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a run is made, beyond what is run: none of it changes a decision."""

    patience_s: float = DEFAULT_PATIENCE_S
    on_progress: Callable[[Progress], None] | None = None
    recorders: tuple[Recorder, ...] = ()
    checkpoint_every: int | None = None  # updates; one is written at the end in any case, where the engine can
    stop: Stop | None = None


def run(
    job: Job,
    engine: Engine,
    limits: Limits,
    folder: OutFolder | None,
    manner: Manner,
    state: dict[str, Any] | None = None,
    over: str | None = None,
) -> Result:
    """Open the engine, let the coordinator run, close.

    state: a checkpoint's, to continue from. over: why the run was over in it, and only has to be brought to its end.
    """
    metrics = Metrics()
    watchers: list[Recorder] = [metrics, *manner.recorders]
    with ExitStack() as to_close:
        to_close.callback(engine.close)
        to_close.callback(_close_all, watchers)
        try:
            engine.open(job)
            told = watchers  # of the past, where there is one
            newest, before, in_vain = 0, -1, 0
            while True:
                try:
                    with ExitStack() as writing:  # a checkpoint being written is finished, whatever happens
                        result = _run(
                            job, engine, limits, folder, manner, state, metrics, watchers, told, over, writing
                        )
                    break
                except LearnerLost as lost:
                    newest = max(newest, metrics.updates)
                    folder, state = _step_back(lost, folder, newest, watchers)
                    version = state["protocol"]["version"]
                    over = lost.run_was_over if version == newest else None
                    in_vain = in_vain + 1 if version == before else 0
                    if in_vain == STEPS_IN_VAIN:
                        lost.add_note(f"(it happened {in_vain} times at version {version})")
                        raise
                    before = version
                    metrics = Metrics()
                    watchers[0] = metrics
                    told = [metrics]  # the others know it already
        except Exception as error:
            early = not metrics.updates or (isinstance(error, BadInput) and len(metrics.evaluations) <= 1)
            if folder is not None and state is None and early:
                _close_all(watchers)
                folder.discard()  # a run that never got going is no run
            raise
    if folder is not None:
        folder.finish(result.summary)
    return result


def _step_back(
    lost: LearnerLost, folder: OutFolder | None, version: int, watchers: list[Recorder]
) -> tuple[OutFolder, dict[str, Any]]:
    """Where to go on from when a part of the newest version is gone: the last checkpoint."""
    if folder is None:
        lost.add_note("(without a folder for checkpoints there is nothing to go back to; give out)")
        raise lost
    for watcher in watchers:
        if isinstance(watcher, TraceWriter):
            watcher.close()
    watchers[:] = [watcher for watcher in watchers if not isinstance(watcher, TraceWriter)]
    checkpoints = CheckpointFolder(folder.path)
    try:
        loaded = checkpoints.load()
    except BadInput as nothing:
        raise lost from nothing
    for sentence in loaded.damaged:
        warn(sentence)
    back = f"steps back from version {version} to its checkpoint of version {loaded.version}"
    warn(f"{lost}; the run {back if version > loaded.version else f'goes on at version {version}, without loss'}")
    return OldFolder(folder.path, loaded.state["trace_bytes"]), loaded.state


def _run(
    job: Job,
    engine: Engine,
    limits: Limits,
    folder: OutFolder | None,
    manner: Manner,
    state: dict[str, Any] | None,
    metrics: Metrics,
    watchers: list[Recorder],
    told: list[Recorder],
    over: str | None,
    writing: ExitStack,
) -> Result:
    if state is not None:
        engine.restore(state["engine"], state["protocol"]["time"])
        state["engine"] = None  # it may be large
        torch.set_rng_state(state["rng"])
    trace = None
    if folder is not None:
        trace = folder.make(told)
        watchers.append(trace)
    pace = _Pace(job, engine, limits, metrics, watchers, manner)
    coordinator = Coordinator(
        job.policy,
        engine,
        job.ledger,
        watchers,
        workers=engine.workers,
        after_update=pace.after_update,
        patience_s=manner.patience_s,
        at_end=pace.at_end,
        stop=manner.stop,
    )
    pace.coordinator = coordinator
    if trace is not None and engine.keeps_checkpoints:
        assert folder is not None
        pace.checkpoints = checkpoints_of(folder.path, trace, coordinator, engine, manner.checkpoint_every)
        if pace.checkpoints is not None:
            writing.callback(pace.checkpoints.finish)
    if state is None:
        header = _header(job, engine, limits, pace.evaluate_every)
        for watcher in watchers:
            watcher.run(header)
    else:
        for watcher in watchers:
            watcher.resumed(state["protocol"]["time"], state["protocol"]["version"], limits.options())
        coordinator.resume(state["protocol"], over)
    if pace.checkpoints is not None and engine.may_lose_learner and state is None:
        pace.checkpoints.take(0.0)  # there must be one to go back to
    try:
        with _no_garbage(job.task is None):
            time = coordinator.run()
    except (QuorumLost, WorkerFailed, BadInput) as error:
        worth_it = coordinator.version > 0 or not isinstance(error, BadInput)
        if pace.checkpoints is not None and coordinator.is_waiting and worth_it:
            error.add_note(pace.checkpoints.last_words(coordinator.last_time))
        raise
    try:
        pace.last_evaluation(coordinator.version, time)
        fingerprint = engine.digest()
        if folder is not None:
            engine.write_parameters(folder.path / PARAMETERS_FILE)
        parameters, averaged = engine.parameters(), engine.averaged_parameters()
    except LearnerLost as lost:
        lost.run_was_over = coordinator.why_over
        raise
    for watcher in watchers:
        watcher.ended(time, coordinator.version, coordinator.why_over, fingerprint)
    return Result(
        metrics=metrics,
        parameters=parameters,
        averaged=averaged,
        out=None if folder is None else folder.path,
        summary=metrics.summary(),
        stopped_by=None if manner.stop is None or manner.stop.signal is None else manner.stop.signal.name,
    )


def _close_all(watchers: list[Recorder]) -> None:
    for watcher in watchers:
        watcher.close()


@contextmanager
def _no_garbage(sure: bool) -> Iterator[None]:
    """Our own loop makes no reference cycles, so without a user's task there is nothing for the collector to find.

    It would look all the same, again and again, at every ticket in flight: half the cost at 10,000 workers.
    """
    collecting = gc.isenabled()
    if sure:
        gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _header(job: Job, engine: Engine, limits: Limits, evaluate_every: int) -> dict[str, Any]:
    return {
        "quorate": VERSION,
        "policy": {"name": job.policy.name, **job.policy.options()},
        "engine": engine.describe(),
        "task": None if job.task is None else job.task.name,
        "workers": engine.workers,
        "seed": job.seed,
        "samples": job.ledger.samples,
        "batch_size": job.ledger.batch_size,
        "learning": job.learning.options(),
        **limits.options(),
        "evaluate_every": evaluate_every,
        "parameter_bytes": engine.parameter_bytes(),
    }


class _Pace:
    """What is done after each version: evaluate, report progress, see whether it is enough."""

    def __init__(
        self,
        job: Job,
        engine: Engine,
        limits: Limits,
        metrics: Metrics,
        watchers: list[Recorder],
        manner: Manner,
    ) -> None:
        self._engine, self._metrics, self._watchers, self._on_progress = (
            engine,
            metrics,
            watchers,
            manner.on_progress,
        )
        self._stop = manner.stop
        self.coordinator: Coordinator | None = None
        self.checkpoints: Checkpoints | None = None
        self._updates = limits.updates
        self._until = limits.condition()
        expected = limits.expected_updates(job.ledger, job.policy.begin(engine.workers).per_update)
        self._limits, self._samples = limits, job.ledger.samples
        self.evaluate_every = limits.evaluate_every or (max(1, expected // 100) if expected else 20)
        self._evaluates = job.task is not None
        self._evaluated_at = metrics.evaluations[-1].version if metrics.evaluations else -1

    def after_update(self, version: int, time: float, loss: float | None) -> str | None:
        over = self._updates is not None and version >= self._updates
        if self._evaluates and version % self.evaluate_every == 0:
            self._evaluate(version, time)
        if self._until is not None:
            over = over or self._until.holds(self._values(version, time, loss))
        if self._on_progress is not None:
            self._on_progress(Progress(version, time, loss, self._metrics.drop_rate(), self._share(version)))
        if over:
            return LIMIT_REACHED
        asked = None if self._stop is None else self._stop.reason
        if asked is not None:
            assert self.coordinator is not None
            self.coordinator.end_at_rest(asked)
        elif self.checkpoints is not None:
            self.checkpoints.after_update(version, time)
            if self._engine.learner_leaves():
                assert self.coordinator is not None
                self.coordinator.call_at_rest(self.checkpoints.move_learner)
        return None

    def at_end(self, time: float) -> None:
        if self.checkpoints is not None:
            self.checkpoints.take_last(time)

    def last_evaluation(self, version: int, time: float) -> None:
        if self._evaluates and self._evaluated_at != version:
            self._evaluate(version, time)

    def _evaluate(self, version: int, time: float) -> None:
        measures = self._engine.evaluate()
        self._evaluated_at = version
        if measures:
            for watcher in self._watchers:
                watcher.evaluated(time, version, measures)

    def _values(self, version: int, time: float, loss: float | None) -> dict[str, float]:
        values: dict[str, float] = {
            "updates": version,
            "seconds": time,
            "samples": self._metrics.samples_applied,
        }
        if loss is not None:
            values["loss"] = loss
        if self._evaluated_at == version and self._metrics.evaluations:
            values |= self._metrics.evaluations[-1].measures
        return values

    def _share(self, version: int) -> float | None:
        return self._limits.share(version, self._metrics.seconds, self._metrics.samples_applied, self._samples)
