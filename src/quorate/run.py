"""One run from open to close, as `train`, `resume` and `replay` share it: limits, options, results and the loop."""

from __future__ import annotations

import gc
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quorate.checkpoint import CheckpointFolder
from quorate.checkpoint_schedule import Checkpoints, checkpoints_of, warn
from quorate.coordinator import LIMIT_REACHED, AfterUpdate, Coordinator
from quorate.engines.base import Engine, Job
from quorate.errors import BadInput, ClusterLost, LearnerLost, check_at_least
from quorate.ledger import Ledger
from quorate.machine import waited_since
from quorate.metrics import Metrics
from quorate.out_folder import PARAMETERS_FILE, OutFolder, ResumedFolder
from quorate.stopping import EvaluationCutOff, Stop, Until, parse_until
from quorate.trace import Recorder, TraceWriter


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run ends, and how often it is evaluated."""

    updates: int | None = None
    epochs: int | None = None
    until: str | Until | None = None
    evaluate_every: int | None = None

    def __post_init__(self) -> None:
        if self.updates is None and self.epochs is None and self.until is None:
            raise BadInput("a run needs an end: give updates, epochs or until")
        for name, count in ("updates", self.updates), ("epochs", self.epochs), ("evaluate_every", self.evaluate_every):
            if count is not None:
                check_at_least(name, count, 1)
        if isinstance(self.until, str):
            object.__setattr__(self, "until", parse_until(self.until))

    def options(self) -> dict[str, Any]:
        """The limits as a trace records them."""
        condition = self.condition()
        until = None if condition is None else condition.text()
        return {"updates": self.updates, "epochs": self.epochs, "until": until}

    def condition(self) -> Until | None:
        assert not isinstance(self.until, str)
        return self.until

    def expected_updates(self, ledger: Ledger, per_update: int) -> int | None:
        """The number of updates in the run; None if it is not known beforehand."""
        if self.updates is not None:
            return self.updates
        if self.epochs is None or ledger.batches_per_epoch is None:
            return None
        return self.epochs * math.ceil(ledger.batches_per_epoch / per_update)

    def share(self, updates: int, seconds: float, samples: int, samples_per_epoch: int | None) -> float | None:
        """The share of the run that is done, by the limit that is nearest; None if no end can be foreseen.

        Epochs are counted in samples, since the number of updates in an epoch may change during the run.
        """
        done = -1.0  # one number instead of a list: this runs after every update, and a simulated run has many
        if self.updates is not None:
            done = updates / self.updates
        if self.epochs is not None and samples_per_epoch:
            done = max(done, samples / (self.epochs * samples_per_epoch))
        if self.until is not None:
            done = max(done, self._share_until(updates, seconds, samples))
        return None if done < 0 else min(1.0, done)

    def _share_until(self, updates: int, seconds: float, samples: int) -> float:
        until = self.condition()
        reached = {"updates": updates, "seconds": seconds, "samples": samples}
        if until is None or until.name not in reached or until.relation != ">=" or until.target <= 0:
            return -1.0
        return reached[until.name] / until.target


DEFAULT_PATIENCE_S = 600.0
#: Rollbacks to the same version after which a run gives up.
ROLLBACKS_WITHOUT_PROGRESS = 10

try:
    VERSION = version("quorate")
except PackageNotFoundError:  # run from a source tree that is not installed
    VERSION = "0+unknown"


@dataclass(frozen=True)
class Progress:
    """The progress of a run, for a progress bar."""

    updates: int
    seconds: float
    loss: float | None
    drop_rate: float
    share: float | None  # of the whole run, if its end is known


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    metrics: Metrics
    parameters: dict[str, Tensor]
    averaged: dict[str, Tensor] | None = None
    out: Path | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None  # the signal that ended it early
    problem: str | None = None  # why the run moved to another folder, which is then `out`

    @property
    def digest(self) -> str | None:
        """Fingerprint of the final parameters and buffers; None without gradients."""
        return self.metrics.digest

    @property
    def evaluation(self) -> dict[str, float]:
        """The task's measures of the last version."""
        return self.metrics.evaluations[-1].measures if self.metrics.evaluations else {}

    def __repr__(self) -> str:
        facts = self._facts()
        run = facts.pop("run")
        return f"Result({run}: {', '.join(f'{name} {value}' for name, value in facts.items())})"

    def _repr_html_(self) -> str:
        """For a notebook: a small table."""
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in self._facts().items())
        return f"<table>{''.join(rows)}</table>"

    def _facts(self) -> dict[str, str]:
        metrics, header = self.metrics, self.metrics.header
        policy = dict(header.get("policy") or {})
        split = f" {policy['quorum']}+{policy['backups']}" if policy.get("backups") is not None else ""
        workers, task = header.get("workers"), header.get("task") or "no gradients"
        found = {"run": f"{policy.get('name', 'a policy')}{split or f' {workers}'}, {task}"}
        found |= {"updates": f"{metrics.updates:,}", "seconds": f"{metrics.seconds:.4g}"}
        found |= {} if metrics.last_loss is None else {"loss": f"{metrics.last_loss:.4g}"}
        found |= {name: f"{value:.4g}" for name, value in self.evaluation.items()}
        found |= {} if self.stopped_by is None else {"stopped by": self.stopped_by}
        return found | ({} if self.out is None else {"out": str(self.out)})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run that change no decision."""

    patience_s: float = DEFAULT_PATIENCE_S
    on_progress: Callable[[Progress], None] | None = None
    recorders: tuple[Recorder, ...] = ()
    checkpoint_every: int | None = None  # updates (None: by time); the end of a run has a checkpoint in any case
    stop: Stop | None = None


class RunRecord:
    """The recorders of a run from its header to its end: its metrics, the caller's recorders, the trace in its folder.

    folder: None: neither a trace nor a summary is written.
    """

    def __init__(self, recorders: Sequence[Recorder], folder: OutFolder | None) -> None:
        self.folder = folder
        self.metrics = Metrics()
        self.recorders: list[Recorder] = [self.metrics, *recorders]
        self._behind = self.recorders  # the recorders to which a resumed run tells its past events
        self._trace: TraceWriter | None = None
        self._core_waits: dict[int, float] = {}
        self._parameters_at = -1  # `folder.moves` when the parameters were written

    def open(self) -> None:
        """Make the folder and open the trace; in a resumed run the recorders are told the past events."""
        if self.folder is not None:
            self._trace = self.folder.make(self._behind)
            self.recorders.append(self._trace)

    def coordinator(
        self,
        job: Job,
        engine: Engine,
        *,
        after_update: AfterUpdate,
        patience_s: float,
        at_end: Callable[[float], None] | None = None,
        stop: Stop | None = None,
    ) -> Coordinator:
        """The coordinator of the run, which tells the recorders every event and decision."""
        return Coordinator(
            job.policy,
            engine,
            job.ledger,
            self.recorders,
            after_update=after_update,
            patience_s=patience_s,
            at_end=at_end,
            stop=stop,
        )

    def begin(self, job: Job, engine: Engine, limits: dict[str, Any], evaluate_every: int) -> None:
        """Tell the recorders the header of a new run."""
        task = job.task
        header = {
            "quorate": VERSION,
            **job.policy.header(engine.workers),
            "engine": engine.describe(),
            "task": None if task is None else task.name,
            "task_file": None if task is None else task.file,
            "workers": engine.workers,
            **engine.header(),
            "seed": job.seed,
            "samples": job.ledger.samples,
            "batch_size": job.ledger.batch_size,
            "learning": job.learning.options(),
            **limits,
            "evaluate_every": evaluate_every,
            "parameter_bytes": engine.parameter_bytes(),
        }
        for recorder in self.recorders:
            recorder.run(header)
        self._core_waits = engine.core_waits()

    def resume(self, time: float, version: int, limits: dict[str, Any], engine: Engine) -> None:
        """Tell the recorders that the run continues from a checkpoint."""
        for recorder in self.recorders:
            recorder.resumed(time, version, limits)
        self._core_waits = engine.core_waits()

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        """Tell the recorders the measures of a version."""
        for recorder in self.recorders:
            recorder.evaluated(time, version, measures)

    def write_parameters(self, engine: Engine) -> None:
        """Write the newest parameters into the folder; nothing to do where the folder has them already."""
        if self.folder is not None:
            self.folder.keep(lambda: self._write_parameters(engine))

    def _write_parameters(self, engine: Engine) -> None:
        assert self.folder is not None
        if self.folder.moves != self._parameters_at:  # after a move to another folder they are written again
            engine.write_parameters(self.folder.path / PARAMETERS_FILE)
            self._parameters_at = self.folder.moves

    def end(self, time: float, coordinator: Coordinator, engine: Engine, digest: str | None) -> dict[str, Any]:
        """Tell the recorders the end, and write the rest of the trace and the summary; returns the summary."""
        if self._trace is not None:
            self._trace.core_wait_s = waited_since(self._core_waits, engine.core_waits())
        for recorder in self.recorders:
            recorder.ended(time, coordinator.version, coordinator.why_over, digest)
        summary = self.metrics.summary()

        def write_end() -> None:
            assert self.folder is not None and self._trace is not None
            self._write_parameters(engine)
            self._trace.position()
            self.folder.finish(summary)

        if self.folder is not None:
            self.folder.keep(write_end)
        return summary

    def close_trace(self) -> None:
        """Close the trace of a run that rolls back to a checkpoint."""
        if self._trace is not None:
            self._trace.close()
            self.recorders.remove(self._trace)
            self._trace = None

    def roll_back(self, folder: OutFolder) -> None:
        """Continue in the folder of a checkpoint; only the new metrics need the past events."""
        self.folder = folder
        self.recorders[0] = self.metrics = Metrics()
        self._behind = [self.metrics]
        self._parameters_at = -1

    def close(self) -> None:
        """Close the recorders; safe to call twice."""
        for recorder in self.recorders:
            recorder.close()


def run(
    job: Job,
    engine: Engine,
    limits: Limits,
    folder: OutFolder | None,
    options: RunOptions,
    state: dict[str, Any] | None = None,
    over: str | None = None,
) -> Result:
    """Open the engine, let the coordinator run, close. A lost learner rolls the run back to the last checkpoint.

    state: the state of a checkpoint to continue from.
    over: why the run was over in that state, if it only has to be brought to its end.
    """
    record = RunRecord(options.recorders, folder)
    with ExitStack() as to_close:
        to_close.callback(engine.close)
        to_close.callback(record.close)
        try:
            engine.open(job)
            newest, before, repeated = 0, -1, 0
            while True:
                try:
                    with ExitStack() as writing:  # waits for a checkpoint being written, also after an error
                        try:
                            result = _run(job, engine, limits, options, record, state, over, writing)
                        except ClusterLost as lost:
                            if record.folder is not None:  # warn at once: Ray may end this process at any later call
                                path = shlex.quote(str(record.folder.path))
                                warn(f"{lost}; to go on: quorate train --resume {path}")
                            raise
                    break
                except LearnerLost as lost:
                    newest = max(newest, record.metrics.updates)
                    state = _roll_back(lost, record, newest)
                    version = state["protocol"]["version"]
                    over = lost.run_was_over if version == newest else None
                    repeated = repeated + 1 if version == before else 0
                    if repeated == ROLLBACKS_WITHOUT_PROGRESS:
                        lost.add_note(f"(it happened {repeated} times at version {version})")
                        raise
                    before = version
        except Exception as error:
            metrics = record.metrics
            early = not metrics.updates or (isinstance(error, BadInput) and len(metrics.evaluations) <= 1)
            if record.folder is not None and state is None and early:
                record.close()
                record.folder.discard()
            raise
    return result


def _roll_back(lost: LearnerLost, record: RunRecord, version: int) -> dict[str, Any]:
    """The state of the last checkpoint, to go on from when a part of the newest version is gone."""
    folder = record.folder
    if folder is None:
        lost.add_note("(without a folder for checkpoints there is nothing to go back to; give out)")
        raise lost
    record.close_trace()
    try:
        loaded = CheckpointFolder(folder.path).load()
    except BadInput as no_checkpoint:
        raise lost from no_checkpoint
    for sentence in loaded.damaged:
        warn(sentence)
    back = f"steps back from version {version} to its checkpoint of version {loaded.version}"
    warn(f"{lost}; the run {back if version > loaded.version else f'goes on at version {version}, without loss'}")
    resumed = ResumedFolder(folder.path, loaded.state["trace_bytes"])
    resumed.problem = folder.problem
    record.roll_back(resumed)
    return loaded.state


def _run(
    job: Job,
    engine: Engine,
    limits: Limits,
    options: RunOptions,
    record: RunRecord,
    state: dict[str, Any] | None,
    over: str | None,
    writing: ExitStack,
) -> Result:
    if state is not None:
        engine.restore(state["engine"], state["protocol"]["time"])
        state["engine"] = None  # frees memory
        torch.set_rng_state(state["rng"])
    record.open()
    folder = record.folder
    hooks = _UpdateHooks(job, engine, limits, record, options)
    coordinator = record.coordinator(
        job,
        engine,
        after_update=hooks.after_update,
        patience_s=options.patience_s,
        at_end=hooks.at_end,
        stop=options.stop,
    )
    hooks.coordinator = coordinator
    if folder is not None and engine.keeps_checkpoints:
        hooks.checkpoints = checkpoints_of(folder, coordinator, engine, options.checkpoint_every)
        if hooks.checkpoints is not None:
            writing.callback(hooks.checkpoints.finish)
    if state is None:
        record.begin(job, engine, limits.options(), hooks.evaluate_every)
        if hooks.checkpoints is not None and engine.may_lose_learner:
            hooks.checkpoints.take(0.0)  # a rollback needs a checkpoint from the start
    else:
        protocol = state["protocol"]
        hooks.catch_up(protocol["version"], protocol["time"])
        record.resume(protocol["time"], protocol["version"], limits.options(), engine)
        coordinator.resume(protocol, over)
    try:
        with _no_garbage_collection() if job.task is None else nullcontext():
            time = coordinator.run()
    except (LearnerLost, ClusterLost):
        raise
    except (Exception, EvaluationCutOff) as error:
        if hooks.checkpoints is not None and coordinator.version > 0:
            error.add_note(hooks.checkpoints.save_after_error())
            if folder is not None and folder.problem is not None:
                error.add_note(folder.problem)
                error.run_folder = folder.path  # type: ignore[union-attr]
        raise
    try:
        hooks.last_evaluation(coordinator.version, time)
        fingerprint = engine.digest()
        record.write_parameters(engine)
        parameters, averaged = engine.parameters(), engine.averaged_parameters()
    except LearnerLost as lost:
        lost.run_was_over = coordinator.why_over
        raise
    summary = record.end(time, coordinator, engine, fingerprint)
    return Result(
        metrics=record.metrics,
        parameters=parameters,
        averaged=averaged,
        out=None if folder is None else folder.path,
        summary=summary,
        problem=None if folder is None else folder.problem,
        stopped_by=None if options.stop is None or options.stop.signal is None else options.stop.signal.name,
    )


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turn Python's garbage collector off for a run without a user's task, because our own loop makes no cycles.

    The collector would scan every ticket in flight again and again: half the cost of a run with 10,000 workers.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class _UpdateHooks:
    """Work after each version: evaluate, report progress, check the limits, take checkpoints."""

    def __init__(self, job: Job, engine: Engine, limits: Limits, record: RunRecord, options: RunOptions) -> None:
        self._engine, self._record = engine, record
        self._metrics = metrics = record.metrics
        self._on_progress, self._stop = options.on_progress, options.stop
        self.coordinator: Coordinator | None = None
        self.checkpoints: Checkpoints | None = None
        self._limits, self._samples = limits, job.ledger.samples
        self._updates, self._until = limits.updates, limits.condition()
        expected = limits.expected_updates(job.ledger, job.policy.begin(engine.workers).per_update)
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
            metrics = self._metrics
            share = self._limits.share(version, metrics.seconds, metrics.samples_applied, self._samples)
            self._on_progress(Progress(version, time, loss, metrics.drop_rate(), share))
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

    def catch_up(self, version: int, time: float) -> None:
        """Evaluate the version of a checkpoint if its evaluation was due, but the run broke off before it."""
        if version and version % self.evaluate_every == 0:
            self.last_evaluation(version, time)

    def last_evaluation(self, version: int, time: float) -> None:
        if self._evaluates and self._evaluated_at != version:
            self._evaluate(version, time)

    def _evaluate(self, version: int, time: float) -> None:
        with nullcontext() if self._stop is None else self._stop.evaluating():
            measures = self._engine.evaluate()
        self._evaluated_at = version
        if measures:
            self._record.evaluated(time, version, measures)

    def _values(self, version: int, time: float, loss: float | None) -> dict[str, float]:
        values: dict[str, float] = {"updates": version, "seconds": time, "samples": self._metrics.samples_applied}
        if loss is not None:
            values["loss"] = loss
        if self._evaluated_at == version and self._metrics.evaluations:
            values |= self._metrics.evaluations[-1].measures
        return values
