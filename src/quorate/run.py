"""One run from open to close, as `train`, `resume` and `replay` share it: limits, options, results and the loop."""

from __future__ import annotations

import gc
import math
import shlex
from collections.abc import Callable, Iterator
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
from quorate.conditions import Until, parse_until
from quorate.coordinator import LIMIT_REACHED, Coordinator
from quorate.engines.base import Engine, Job
from quorate.errors import BadInput, ClusterLost, LearnerLost, check_at_least
from quorate.ledger import Ledger
from quorate.machine import machine, waited_since
from quorate.metrics import Metrics
from quorate.out_folder import PARAMETERS_FILE, OutFolder, ResumedFolder
from quorate.stopping import EvaluationCutOff, Stop
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
        for name in ("updates", "epochs", "evaluate_every"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
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
    metrics = Metrics()
    watchers: list[Recorder] = [metrics, *options.recorders]
    with ExitStack() as to_close:
        to_close.callback(engine.close)
        to_close.callback(_close_all, watchers)
        try:
            engine.open(job)
            told = watchers  # recorders to which a resumed run tells its past events
            newest, before, repeated = 0, -1, 0
            while True:
                try:
                    with ExitStack() as writing:  # waits for a checkpoint being written, also after an error
                        try:
                            result = _run(
                                job, engine, limits, folder, options, state, metrics, watchers, told, over, writing
                            )
                        except ClusterLost as lost:
                            if folder is not None:  # warn at once: Ray may end this process at any later call
                                warn(f"{lost}; to go on: quorate train --resume {shlex.quote(str(folder.path))}")
                            raise
                    break
                except LearnerLost as lost:
                    newest = max(newest, metrics.updates)
                    folder, state = _roll_back(lost, folder, newest, watchers)
                    version = state["protocol"]["version"]
                    over = lost.run_was_over if version == newest else None
                    repeated = repeated + 1 if version == before else 0
                    if repeated == ROLLBACKS_WITHOUT_PROGRESS:
                        lost.add_note(f"(it happened {repeated} times at version {version})")
                        raise
                    before = version
                    watchers[0] = metrics = Metrics()
                    told = [metrics]  # the other watchers have seen the past already
        except Exception as error:
            early = not metrics.updates or (isinstance(error, BadInput) and len(metrics.evaluations) <= 1)
            if folder is not None and state is None and early:
                _close_all(watchers)
                folder.discard()
            raise
    return result


def _roll_back(
    lost: LearnerLost, folder: OutFolder | None, version: int, watchers: list[Recorder]
) -> tuple[OutFolder, dict[str, Any]]:
    """The folder and the state of the last checkpoint, to go on from when a part of the newest version is gone."""
    if folder is None:
        lost.add_note("(without a folder for checkpoints there is nothing to go back to; give out)")
        raise lost
    for watcher in watchers:
        if isinstance(watcher, TraceWriter):
            watcher.close()
    watchers[:] = [watcher for watcher in watchers if not isinstance(watcher, TraceWriter)]
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
    return resumed, loaded.state


def _run(
    job: Job,
    engine: Engine,
    limits: Limits,
    folder: OutFolder | None,
    options: RunOptions,
    state: dict[str, Any] | None,
    metrics: Metrics,
    watchers: list[Recorder],
    told: list[Recorder],
    over: str | None,
    writing: ExitStack,
) -> Result:
    if state is not None:
        engine.restore(state["engine"], state["protocol"]["time"])
        state["engine"] = None  # frees memory
        torch.set_rng_state(state["rng"])
    trace = None
    if folder is not None:
        trace = folder.make(told)
        watchers.append(trace)
    hooks = _UpdateHooks(job, engine, limits, metrics, watchers, options)
    coordinator = Coordinator(
        job.policy,
        engine,
        job.ledger,
        watchers,
        workers=engine.workers,
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
        header = _header(job, engine, limits, hooks.evaluate_every)
        for watcher in watchers:
            watcher.run(header)
    else:
        protocol = state["protocol"]
        hooks.catch_up(protocol["version"], protocol["time"])
        for watcher in watchers:
            watcher.resumed(protocol["time"], protocol["version"], limits.options())
        coordinator.resume(protocol, over)
    if hooks.checkpoints is not None and engine.may_lose_learner and state is None:
        hooks.checkpoints.take(0.0)  # a rollback needs a checkpoint from the start
    waits = engine.core_waits()
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
    written: set[int] = set()  # `folder.moves` at each write: after a move the parameters are written again

    def write_parameters() -> None:
        assert folder is not None
        if folder.moves not in written:
            engine.write_parameters(folder.path / PARAMETERS_FILE)
            written.add(folder.moves)

    try:
        hooks.last_evaluation(coordinator.version, time)
        fingerprint = engine.digest()
        if folder is not None:
            folder.keep(write_parameters)
        parameters, averaged = engine.parameters(), engine.averaged_parameters()
    except LearnerLost as lost:
        lost.run_was_over = coordinator.why_over
        raise
    if trace is not None:
        trace.core_wait_s = waited_since(waits, engine.core_waits())
    for watcher in watchers:
        watcher.ended(time, coordinator.version, coordinator.why_over, fingerprint)
    summary = metrics.summary()

    def write_end() -> None:
        assert folder is not None and trace is not None
        write_parameters()
        trace.position()
        folder.finish(summary)

    if folder is not None:
        folder.keep(write_end)
    return Result(
        metrics=metrics,
        parameters=parameters,
        averaged=averaged,
        out=None if folder is None else folder.path,
        summary=summary,
        problem=None if folder is None else folder.problem,
        stopped_by=None if options.stop is None or options.stop.signal is None else options.stop.signal.name,
    )


def _close_all(watchers: list[Recorder]) -> None:
    for watcher in watchers:
        watcher.close()


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


def _header(job: Job, engine: Engine, limits: Limits, evaluate_every: int) -> dict[str, Any]:
    return {
        "quorate": VERSION,
        **job.policy.header(engine.workers),
        "engine": engine.describe(),
        "task": None if job.task is None else job.task.name,
        "task_file": None if job.task is None else job.task.file,
        "workers": engine.workers,
        **({"machine": machine(engine.workers)} if engine.name == "local" else {}),
        "seed": job.seed,
        "samples": job.ledger.samples,
        "batch_size": job.ledger.batch_size,
        "learning": job.learning.options(),
        **limits.options(),
        "evaluate_every": evaluate_every,
        "parameter_bytes": engine.parameter_bytes(),
    }


class _UpdateHooks:
    """Work after each version: evaluate, report progress, check the limits, take checkpoints."""

    def __init__(
        self, job: Job, engine: Engine, limits: Limits, metrics: Metrics, watchers: list[Recorder], options: RunOptions
    ) -> None:
        self._engine, self._metrics, self._watchers = engine, metrics, watchers
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
            for watcher in self._watchers:
                watcher.evaluated(time, version, measures)

    def _values(self, version: int, time: float, loss: float | None) -> dict[str, float]:
        values: dict[str, float] = {"updates": version, "seconds": time, "samples": self._metrics.samples_applied}
        if loss is not None:
            values["loss"] = loss
        if self._evaluated_at == version and self._metrics.evaluations:
            values |= self._metrics.evaluations[-1].measures
        return values
