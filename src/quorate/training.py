"""The entry point: train a task under a policy on an engine."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor

from quorate.conditions import KnownMeasure, Until, check_known, parse_until
from quorate.coordinator import LIMIT_REACHED, Coordinator
from quorate.engines.base import Engine, Job
from quorate.errors import BadInput, check_at_least
from quorate.learner import Learning, digest
from quorate.ledger import Ledger
from quorate.metrics import Metrics
from quorate.policies import Policy
from quorate.task import bind_task
from quorate.trace import TRACE_FILE, Recorder, TraceWriter

SUMMARY_FILE = "summary.json"
PARAMETERS_FILE = "parameters.safetensors"
DEFAULT_PATIENCE_S = 600.0

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

    @property
    def digest(self) -> str | None:
        """Fingerprint of the final parameters and buffers; None without gradients."""
        return self.metrics.digest

    @property
    def evaluation(self) -> dict[str, float]:
        """The task's measures of the last version."""
        return self.metrics.evaluations[-1].measures if self.metrics.evaluations else {}


def train(
    task: Any,
    policy: Policy,
    engine: Engine,
    *,
    updates: int | None = None,
    epochs: int | None = None,
    until: str | Until | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    batch_size: int | None = None,
    samples: int | None = None,
    learning: Learning | None = None,
    evaluate_every: int | None = None,
    patience_s: float = DEFAULT_PATIENCE_S,
    on_progress: Callable[[Progress], None] | None = None,
    recorders: tuple[Recorder, ...] = (),
) -> Result:
    """Train `task` under `policy` on `engine`.

    `task` is an object or a class with the methods of `quorate.Task`, or the text `digits`, `file.py:Class` or
    `package.module:Class`; with None no gradients are computed, only times, staleness, drops and bytes.
    It ends after `updates`, after `epochs`, or when `until` holds ("accuracy>=0.95"), whichever comes first;
    give at least one. `out` is a new folder for the trace, the summary and the parameters.

    samples: without a task, the size of the data whose epochs are counted (None: an endless stream).
    evaluate_every: updates between evaluations (by default some 100 in the run, and always the last).
    patience_s: how long the run may have fewer live workers than the policy needs before it gives up.
    recorders: told of everything that happens, as the trace is.
    """
    limits = Limits(updates=updates, epochs=epochs, until=until, evaluate_every=evaluate_every)
    condition = limits.condition()
    if condition is not None and task is None:
        check_known(condition, ("updates", "seconds", "samples"), "a run without gradients")
    elif condition is not None:
        recorders = (*recorders, KnownMeasure(condition, ends_run=True))
    if not patience_s >= 0:
        raise BadInput(f"patience_s is {patience_s}, but a time to wait cannot be negative")
    bound = None if task is None else bind_task(task, batch_size)
    engine.check(policy)
    if bound is None:
        ledger = Ledger(samples, 1 if batch_size is None else batch_size, epochs, seed)
    else:
        ledger = Ledger(bound.samples(), bound.batch_size, epochs, seed)
    _check_round_fits(policy.begin(engine.workers), ledger)
    job = Job(task=bound, policy=policy, ledger=ledger, learning=learning or Learning(), seed=seed)
    folder = None if out is None else OutFolder(Path(out))
    return run(job, engine, limits, folder, patience_s=patience_s, on_progress=on_progress, recorders=recorders)


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

    def condition(self) -> Until | None:
        assert not isinstance(self.until, str)
        return self.until

    def expected_updates(self, ledger: Ledger, per_update: int) -> int | None:
        """How many updates the run has, as far as that is known beforehand."""
        if self.updates is not None:
            return self.updates
        if self.epochs is None or ledger.batches_per_epoch is None:
            return None
        return self.epochs * math.ceil(ledger.batches_per_epoch / per_update)


def _check_round_fits(policy: Policy, ledger: Ledger) -> None:
    """A round that no epoch can fill would make every update a short one."""
    need, have = policy.per_update, ledger.batches_per_epoch
    if have is None or need <= have:
        return
    assert ledger.samples is not None
    most = ledger.samples // need
    remedy = f"a batch_size of at most {most}" if most else f"at most {ledger.samples} gradients an update"
    raise BadInput(
        f"an update of {policy.name} takes {need} batches of {ledger.batch_size} samples, but an epoch has only "
        f"{have} ({ledger.samples} samples); choose {remedy}"
    )


class OutFolder:
    """Where a run leaves its files. Nothing is written before the run is known to be sound."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_dir():
            raise BadInput(f"out is {str(path)!r}, which is a file; name a new folder")
        for name in (TRACE_FILE, SUMMARY_FILE, PARAMETERS_FILE):
            if (path / name).exists():
                raise BadInput(f"the folder {str(path)!r} already holds a run ({name}); name another, or move it away")
        self._made = not path.exists()

    def make(self) -> TraceWriter:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return TraceWriter(self.path / TRACE_FILE)
        except OSError as error:
            raise BadInput(f"the folder {str(self.path)!r} cannot be written: {error.strerror}") from error

    def discard(self) -> None:
        """Bad input came to light only when the run had begun: leave no trace of it."""
        (self.path / TRACE_FILE).unlink(missing_ok=True)
        if self._made and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def finish(self, result: Result) -> None:
        text = json.dumps(result.summary, indent=2)
        (self.path / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")
        if result.parameters:
            try:
                from safetensors.torch import save_file
            except ImportError:
                return  # a bare machine: the trace and the summary have all but the parameters
            shared_safe = {name: tensor.contiguous().clone() for name, tensor in result.parameters.items()}
            save_file(shared_safe, self.path / PARAMETERS_FILE)


def run(
    job: Job,
    engine: Engine,
    limits: Limits,
    folder: OutFolder | None,
    *,
    patience_s: float = DEFAULT_PATIENCE_S,
    on_progress: Callable[[Progress], None] | None = None,
    recorders: tuple[Recorder, ...] = (),
) -> Result:
    """Open the engine, let the coordinator run, close: the part that `train` and `replay` share."""
    metrics = Metrics()
    watchers: list[Recorder] = [metrics, *recorders]
    try:
        engine.open(job)
        if folder is not None:
            watchers.append(folder.make())
        pace = _Pace(job, engine, limits, metrics, watchers, on_progress)
        header = _header(job, engine, limits, pace.evaluate_every)
        for watcher in watchers:
            watcher.run(header)
        coordinator = Coordinator(
            job.policy,
            engine,
            job.ledger,
            watchers,
            workers=engine.workers,
            after_update=pace.after_update,
            patience_s=patience_s,
        )
        with _no_garbage(job.task is None):
            time = coordinator.run()
        pace.last_evaluation(coordinator.version, time)
        parameters = engine.parameters()
        for watcher in watchers:
            watcher.ended(time, coordinator.version, coordinator.why_over, digest(parameters) if parameters else None)
        result = Result(
            metrics=metrics,
            parameters=parameters,
            averaged=engine.averaged_parameters(),
            out=None if folder is None else folder.path,
            summary=metrics.summary(),
        )
    except Exception as error:
        for watcher in watchers:
            watcher.close()
        if folder is not None and (isinstance(error, BadInput) or not metrics.updates):
            folder.discard()  # a run that never got going is no run
        raise
    finally:
        for watcher in watchers:
            watcher.close()
        engine.close()
    if folder is not None:
        folder.finish(result)
    return result


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
    condition = limits.condition()
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
        "updates": limits.updates,
        "epochs": limits.epochs,
        "until": None if condition is None else condition.text(),
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
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._engine, self._metrics, self._watchers, self._on_progress = (
            engine,
            metrics,
            watchers,
            on_progress,
        )
        self._updates = limits.updates
        self._until = limits.condition()
        expected = limits.expected_updates(job.ledger, job.policy.begin(engine.workers).per_update)
        self._expected = expected
        self.evaluate_every = limits.evaluate_every or (max(1, expected // 100) if expected else 20)
        self._evaluates = job.task is not None
        self._evaluated_at = -1

    def after_update(self, version: int, time: float, loss: float | None) -> str | None:
        over = version == self._updates
        if self._evaluates and version % self.evaluate_every == 0:
            self._evaluate(version, time)
        if self._until is not None:
            over = over or self._until.holds(self._values(version, time, loss))
        if self._on_progress is not None:
            self._on_progress(Progress(version, time, loss, self._metrics.drop_rate(), self._share(version)))
        return LIMIT_REACHED if over else None

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
        if self._expected is not None:
            return min(1.0, version / self._expected)
        if self._until is not None and self._until.name == "updates":
            return min(1.0, version / self._until.target)
        if self._until is not None and self._until.name == "seconds":
            return min(1.0, self._metrics.seconds / self._until.target)
        return None
