"""The entry points `train` and `resume`: train a task under a policy on an engine; continue an interrupted run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.checkpoint import CheckpointFolder
from quorate.coordinator import DATA_USED_UP, LIMIT_REACHED
from quorate.engines.base import Engine, Job
from quorate.engines.local.engine import Local
from quorate.engines.ray import Ray
from quorate.errors import BadInput, check_at_least
from quorate.learner import Learning
from quorate.ledger import Ledger
from quorate.out_folder import OLD_TRACE_FILE, OutFolder, RestartedFolder, ResumedFolder, take_old_trace_back
from quorate.policies import Policy
from quorate.run import DEFAULT_PATIENCE_S, Limits, Progress, Result, RunOptions, run
from quorate.stopping import KnownMeasure, Stop, Until, check_known
from quorate.task import bind_task, recorded_task
from quorate.trace import Recorder, read_whole_header
from quorate.user_code import as_policy, recorded_policy


def train(
    task: Any,
    policy: Policy | str,
    engine: Engine | int | None = None,
    *,
    updates: int | None = None,
    epochs: int | None = None,
    until: str | Until | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    batch_size: int | None = None,
    samples: int | None = None,
    clip_norm: float | None = None,
    ema: float | None = None,
    delay_compensation: float | None = None,
    evaluate_every: int | None = None,
    patience_s: float = DEFAULT_PATIENCE_S,
    checkpoint_every: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    recorders: tuple[Recorder, ...] = (),
) -> Result:
    """Train `task` under `policy` on `engine`.

    The run ends after `updates`, after `epochs`, or when `until` holds ("accuracy>=0.95"), whichever comes first;
    give at least one of them.

    task: an object or a class with the methods of `quorate.Task`, or the text `digits`, `file.py:Class` or
        `package.module:Class`. With None no gradients are computed, only times, staleness, drops and bytes.
    policy: a policy such as `BackupSync(6, 2)`; or a name as on the command line (`full-sync`, `file.py:Class`), if
        it needs no arguments.
    engine: an engine, or a number of local worker processes; None: as many as the policy names, or one a core.
    out: a new folder for the trace, the summary and the parameters.
    samples: without a task, the size of the data whose epochs are counted (None: an endless stream).
    clip_norm: scale the averaged gradient down to this global norm.
    ema: keep a moving average of the parameters with this decay; evaluation then uses the average.
    delay_compensation: λ of DC-ASGD (Zheng et al., 2017), for stale gradients.
    evaluate_every: updates between evaluations (by default some 100 in the run, and always the last).
    patience_s: seconds of silence after which a real worker counts as lost and is replaced (at least 5 s, and three
        times the slowest answer); also the seconds to wait while fewer workers are alive than the policy needs.
    checkpoint_every: updates between checkpoints in `out`, for `resume`; None: one after the first update and then one
        a minute. Engines with checkpoints also write one at the end.
    recorders: observers that hear every event of the run, as the trace does.

    Ctrl-C and SIGTERM end a run with real workers after the current update, or after 5 s if it takes longer. The run
    writes a checkpoint if it has an `out`, and raises `Interrupted`. A second signal ends it at once.
    """
    policy = as_policy(policy)
    engine = _chosen_engine(engine, policy)
    limits = Limits(updates=updates, epochs=epochs, until=until, evaluate_every=evaluate_every)
    condition = limits.condition()
    if condition is not None and task is None:
        check_known(condition, ("updates", "seconds", "samples"), "a run without gradients")
    elif condition is not None:
        recorders = (*recorders, KnownMeasure(condition, ends_run=True))
    learning = Learning(clip_norm=clip_norm, ema=ema, delay_compensation=delay_compensation)
    _check_patience(patience_s)
    if checkpoint_every is not None:
        check_at_least("checkpoint_every", checkpoint_every, 1)
        if not engine.keeps_checkpoints:
            raise BadInput(f"checkpoint_every is {checkpoint_every}, but the {engine.name} engine keeps no checkpoints")
        if out is None:
            raise BadInput(f"checkpoint_every is {checkpoint_every}, but there is no folder to keep them in; give out")
    bound = None if task is None else bind_task(task, batch_size)
    engine.check(policy)
    if bound is None:
        ledger = Ledger(samples, 1 if batch_size is None else batch_size, epochs, seed)
    else:
        ledger = Ledger(bound.samples(), bound.batch_size, epochs, seed)
    begun = policy.begin(engine.workers)
    _check_round_fits(begun, ledger)
    if engine.keeps_checkpoints:
        begun.state()  # raises if the policy's state cannot be saved in a checkpoint
    job = Job(task=bound, policy=policy, ledger=ledger, learning=learning, seed=seed, patience_s=patience_s)
    folder = None if out is None else OutFolder(Path(out))
    options = RunOptions(
        patience_s=patience_s, on_progress=on_progress, recorders=recorders, checkpoint_every=checkpoint_every
    )
    return _run_until_stopped(job, engine, limits, folder, options)


def _run_until_stopped(
    job: Job,
    engine: Engine,
    limits: Limits,
    folder: OutFolder | None,
    options: RunOptions,
    state: dict[str, Any] | None = None,
    over: str | None = None,
) -> Result:
    stop = Stop() if engine.keeps_checkpoints else None
    with nullcontext() if stop is None else stop.listening():
        try:
            result = run(replace(job, stop=stop), engine, limits, folder, replace(options, stop=stop), state, over)
        except KeyboardInterrupt as ended:  # before the first update, or by a second signal
            if stop is not None and stop.signal is not None and not ended.args:
                ended.args = (stop.signal.name,)
            raise
    if result.problem is not None:
        warnings.warn(result.problem, RuntimeWarning, stacklevel=3)
    if result.stopped_by is not None:
        raise Interrupted(result)
    return result


class Interrupted(KeyboardInterrupt):
    """A signal ended the run in good order: `result` is its outcome, and `signal` the name of the signal."""

    def __init__(self, result: Result) -> None:
        self.result, self.signal = result, result.stopped_by
        super().__init__(f"{self.signal} ended the run after update {result.metrics.updates}")


def resume(
    path: str | Path,
    task: Any = None,
    engine: Engine | None = None,
    *,
    policy: Any = None,
    updates: int | None = None,
    epochs: int | None = None,
    until: str | Until | None = None,
    patience_s: float = DEFAULT_PATIENCE_S,
    checkpoint_every: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    recorders: tuple[Recorder, ...] = (),
) -> Result:
    """Continue the run in this folder from its newest sound checkpoint.

    Unfinished tickets are lost and computed again; no sample is lost or used twice. The trace continues in the same
    file, as the trace of one run. `recorders` are told the past events first.

    Task, policy, engine and limits are the recorded ones unless given. `task`, `policy` (a class or `file.py:Class`)
    and `engine` must be given if the header does not describe them fully. Limits given here replace the recorded ones.

    A run that was killed after its last update is only brought to its end. A run that was killed before its first
    checkpoint starts again.
    """
    _check_patience(patience_s)
    path = Path(path)
    take_old_trace_back(path)
    header = read_whole_header(path)
    given = updates is not None or epochs is not None or until is not None
    limits = Limits(
        updates=updates if given else header["updates"],
        epochs=epochs if given else header["epochs"],
        until=until if given else header["until"],
        evaluate_every=header["evaluate_every"],
    )
    condition = limits.condition()
    if condition is not None:
        recorders = (*recorders, KnownMeasure(condition, ends_run=True))
    ledger = Ledger(header["samples"], header["batch_size"], limits.epochs, header["seed"])
    folder, state, over = _find_checkpoint(path, limits, given, ledger)
    if engine is None:
        engine = engine_of(header["engine"], header["workers"])
    if engine.name != header["engine"]["name"]:
        raise BadInput(
            f"the run was made on the {header['engine']['name']} engine, whose checkpoints the {engine.name} engine "
            f"cannot read; give an engine of the same kind, or none"
        )
    if engine.workers != header["workers"]:
        raise BadInput(f"the run has {header['workers']} workers, but the engine given has {engine.workers}")
    bound = bind_task(recorded_task(header) if task is None else task, header["batch_size"])
    if bound.samples() != header["samples"]:
        raise BadInput(
            f"the run was made with {header['samples']} samples, but the task has {bound.samples()}; "
            f"give the task it was made with"
        )
    job = Job(
        task=bound,
        policy=recorded_policy(header["policy"], policy),
        ledger=ledger,
        learning=Learning(**header["learning"]),
        seed=header["seed"],
        patience_s=patience_s,
    )
    engine.check(job.policy)
    options = RunOptions(
        patience_s=patience_s, on_progress=on_progress, recorders=recorders, checkpoint_every=checkpoint_every
    )
    if state is None:
        warnings.warn(
            f"the run in {str(path)!r} was killed before its first checkpoint, so it starts again from the beginning; "
            f"its trace until then is kept in {OLD_TRACE_FILE}",
            RuntimeWarning,
            stacklevel=2,
        )
    return _run_until_stopped(job, engine, limits, folder, options, state, over)


def _find_checkpoint(
    path: Path, limits: Limits, given: bool, ledger: Ledger
) -> tuple[OutFolder, dict[str, Any] | None, str | None]:
    """The folder, the state of its newest sound checkpoint, and why the run was over there, if it only must be ended.

    A run that was killed before its first checkpoint has no state: it starts again.
    """
    checkpoints = CheckpointFolder(path)
    checkpoints.sweep()
    if not checkpoints.versions() and not ResumedFolder(path, 0).has_ended():
        return RestartedFolder(path), None, None
    loaded = checkpoints.load()
    for sentence in loaded.damaged:
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)
    folder = ResumedFolder(path, loaded.state["trace_bytes"])
    over = None if given else loaded.state["protocol"].get("over")
    over = over if over in (LIMIT_REACHED, DATA_USED_UP) else None  # a run that was stopped can go on
    has_ended = over is not None and folder.has_ended()
    if limits.updates is not None and loaded.version >= limits.updates and (over is None or has_ended):
        raise BadInput(f"the run in {str(path)!r} has its {limits.updates} updates already; give more (updates)")
    if has_ended:
        raise BadInput(f"the run in {str(path)!r} is at its end already; give a later one (updates, epochs or until)")
    begun = (loaded.state["protocol"]["ledger"]["stop_at"] or 0) // (ledger.batches_per_epoch or 1)
    if limits.epochs is not None and begun > limits.epochs:
        raise BadInput(
            f"the run in {str(path)!r} has begun epoch {begun}, but epochs is {limits.epochs}; give {begun} or more"
        )
    return folder, loaded.state, over


def engine_of(description: dict[str, Any], workers: int, **anew: Any) -> Engine:
    """The engine that a trace's header describes.

    anew: arguments that a header does not hold because they may change from run to run, e.g. a Ray cluster's address.
    """
    kinds: dict[str, Callable[..., Engine]] = {Local.name: Local, Ray.name: Ray}
    kind = description["name"]
    if kind not in kinds:
        raise BadInput(f"a run of the {kind} engine has no checkpoints to go on from")
    placed = ("shards", "cpus", "gpus", "resources") if kind == Ray.name else ()
    try:
        said = {name: description[name] for name in ("threads", "device", "latency", "faults", "wire", *placed)}
        return kinds[kind](workers, **said, **anew)
    except (LookupError, TypeError) as error:
        raise BadInput(f"the trace does not say what a {kind} engine needs ({error}); give the engine") from error


def _chosen_engine(engine: Engine | int | None, policy: Policy) -> Engine:
    if isinstance(engine, Engine):
        return engine
    if engine is None:
        engine = policy.workers_named or len(os.sched_getaffinity(0))
    if not isinstance(engine, int):
        raise BadInput(
            f"engine is {engine!r}; give a number of local workers, or quorate.Local(8), Ray(8), Simulated(8)"
        )
    return Local(engine)


def _check_patience(patience_s: float) -> None:
    if not patience_s >= 0:
        raise BadInput(f"patience_s is {patience_s}, but a time to wait cannot be negative")


def _check_round_fits(policy: Policy, ledger: Ledger) -> None:
    """Refuse a round that takes more batches than an epoch has: every update would be a short one."""
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
