"""The entry points: train a task under a policy on an engine, and go on with a run that broke off."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quorate.checkpoint import CheckpointFolder
from quorate.conditions import KnownMeasure, Until, check_known
from quorate.coordinator import DATA_USED_UP, LIMIT_REACHED
from quorate.engines.base import Engine, Job
from quorate.engines.local import Local
from quorate.engines.ray import Ray
from quorate.errors import BadInput, check_at_least
from quorate.learner import Learning
from quorate.ledger import Ledger
from quorate.limits import Limits
from quorate.outfolder import OldFolder, OutFolder
from quorate.policies import BackupSync, Policy, make_policy
from quorate.running import DEFAULT_PATIENCE_S, Manner, Progress, Result, run
from quorate.stopping import Stop
from quorate.task import bind_task
from quorate.trace import Recorder, read_header


def train(
    task: Any,
    policy: Policy,
    engine: Engine | int | None = None,
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
    checkpoint_every: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    recorders: tuple[Recorder, ...] = (),
) -> Result:
    """Train `task` under `policy` on `engine`.

    `task` is an object or a class with the methods of `quorate.Task`, or the text `digits`, `file.py:Class` or
    `package.module:Class`; with None no gradients are computed, only times, staleness, drops and bytes.
    It ends after `updates`, after `epochs`, or when `until` holds ("accuracy>=0.95"), whichever comes first;
    give at least one. `out` is a new folder for the trace, the summary and the parameters.

    engine: a number means so many local worker processes; None, as many as the policy names, or one a core.
    samples: without a task, the size of the data whose epochs are counted (None: an endless stream).
    evaluate_every: updates between evaluations (by default some 100 in the run, and always the last).
    patience_s: how long the run may have fewer live workers than the policy needs before it gives up.
    checkpoint_every: updates between checkpoints in `out`, for `resume`. An engine that can keeps one at the end too.
    recorders: told of everything that happens, as the trace is.

    Ctrl-C and SIGTERM end a run with real workers after the update under way, with a checkpoint where there is an
    `out`; `Interrupted` is raised then. A second one ends it at once.
    """
    engine = _chosen_engine(engine, policy)
    limits = Limits(updates=updates, epochs=epochs, until=until, evaluate_every=evaluate_every)
    condition = limits.condition()
    if condition is not None and task is None:
        check_known(condition, ("updates", "seconds", "samples"), "a run without gradients")
    elif condition is not None:
        recorders = (*recorders, KnownMeasure(condition, ends_run=True))
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
    _check_round_fits(policy.begin(engine.workers), ledger)
    job = Job(task=bound, policy=policy, ledger=ledger, learning=learning or Learning(), seed=seed)
    folder = None if out is None else OutFolder(Path(out))
    manner = Manner(
        patience_s=patience_s,
        on_progress=on_progress,
        recorders=recorders,
        checkpoint_every=checkpoint_every,
        stop=Stop() if engine.keeps_checkpoints else None,
    )
    return _run_until_stopped(job, engine, limits, folder, manner)


def _run_until_stopped(
    job: Job,
    engine: Engine,
    limits: Limits,
    folder: OutFolder | None,
    manner: Manner,
    state: dict[str, Any] | None = None,
    over: str | None = None,
) -> Result:
    if manner.stop is None:
        return run(job, engine, limits, folder, manner, state, over)
    with manner.stop.listening():
        try:
            result = run(replace(job, stop=manner.stop), engine, limits, folder, manner, state, over)
        except KeyboardInterrupt as ended:  # before the first update, or at once
            if manner.stop.signal is not None and not ended.args:
                ended.args = (manner.stop.signal.name,)
            raise
    if result.stopped_by is not None:
        raise Interrupted(result)
    return result


class Interrupted(KeyboardInterrupt):
    """A signal ended the run. It ended well: `result` is what it came to, and `signal` says which it was."""

    def __init__(self, result: Result) -> None:
        self.result, self.signal = result, result.stopped_by
        super().__init__(f"{self.signal} ended the run after update {result.metrics.updates}")


def resume(
    path: str | Path,
    task: Any = None,
    engine: Engine | None = None,
    *,
    updates: int | None = None,
    epochs: int | None = None,
    until: str | Until | None = None,
    patience_s: float = DEFAULT_PATIENCE_S,
    checkpoint_every: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    recorders: tuple[Recorder, ...] = (),
) -> Result:
    """Go on with the run in this folder from its newest sound checkpoint.

    What was under way is lost and computed again; no sample is lost or used twice. The trace goes on in the same
    file, and is that of one run. Task, policy, engine and end are the recorded ones unless given; `task` and
    `engine` must be given where the recorded text does not say all of them. An end given here replaces the recorded; a
    run that was killed after its last update is only brought to its end.
    Watchers in `recorders` are told of the past first.
    """
    _check_patience(patience_s)
    path = Path(path)
    header = read_header(path)
    checkpoints = CheckpointFolder(path)
    checkpoints.sweep()
    loaded = checkpoints.load()
    for sentence in loaded.damaged:
        warnings.warn(sentence, RuntimeWarning, stacklevel=2)
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
    folder = OldFolder(path, loaded.state["trace_bytes"])
    over = None if given else loaded.state["protocol"].get("over")
    over = over if over in (LIMIT_REACHED, DATA_USED_UP) else None  # one that was asked to end can go on
    has_ended = over is not None and folder.has_ended()
    if limits.updates is not None and loaded.version >= limits.updates and (over is None or has_ended):
        raise BadInput(f"the run in {str(path)!r} has its {limits.updates} updates already; give more (updates)")
    if has_ended:
        raise BadInput(f"the run in {str(path)!r} is at its end already; give a later one (updates, epochs or until)")
    bound = bind_task(header["task"] if task is None else task, header["batch_size"])
    if bound.samples() != header["samples"]:
        raise BadInput(
            f"the run was made with {header['samples']} samples, but the task has {bound.samples()}; "
            f"give the task it was made with"
        )
    options = dict(header["policy"])
    job = Job(
        task=bound,
        policy=make_policy(options.pop("name"), **options),
        ledger=Ledger(header["samples"], header["batch_size"], limits.epochs, header["seed"]),
        learning=Learning(**header["learning"]),
        seed=header["seed"],
    )
    if engine is None:
        engine = engine_of(header["engine"], header["workers"])
    if engine.name != header["engine"]["name"]:
        raise BadInput(
            f"the run was made on the {header['engine']['name']} engine, whose checkpoints the {engine.name} engine "
            f"cannot read; give an engine of the same kind, or none"
        )
    if engine.workers != header["workers"]:
        raise BadInput(f"the run has {header['workers']} workers, but the engine given has {engine.workers}")
    engine.check(job.policy)
    manner = Manner(
        patience_s=patience_s,
        on_progress=on_progress,
        recorders=recorders,
        checkpoint_every=checkpoint_every,
        stop=Stop() if engine.keeps_checkpoints else None,
    )
    return _run_until_stopped(job, engine, limits, folder, manner, loaded.state, over)


def engine_of(description: dict[str, Any], workers: int, **anew: Any) -> Engine:
    """The engine that a trace's header describes.

    anew: what a header does not hold, since it may be another each time: where a Ray cluster is, and the like.
    """
    common: dict[str, Any] = {name: description[name] for name in ("threads", "device", "latency", "faults", "wire")}
    if description["name"] == Local.name:
        return Local(workers, **common)
    if description["name"] == Ray.name:
        placed = {name: description[name] for name in ("shards", "cpus", "gpus", "resources")}
        return Ray(workers, **common, **placed, **anew)
    raise BadInput(f"a run of the {description['name']} engine has no checkpoints to go on from")


def _chosen_engine(engine: Engine | int | None, policy: Policy) -> Engine:
    if isinstance(engine, Engine):
        return engine
    if engine is None:
        engine = policy.quorum + policy.backups if isinstance(policy, BackupSync) else len(os.sched_getaffinity(0))
    return Local(engine)


def _check_patience(patience_s: float) -> None:
    if not patience_s >= 0:
        raise BadInput(f"patience_s is {patience_s}, but a time to wait cannot be negative")


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
