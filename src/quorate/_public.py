"""The public names, which `quorate` imports when the first one is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quorate import policies
from quorate.data_parallel.iterations import Receipt
from quorate.data_parallel.module import DataParallel
from quorate.data_parallel.sampler import Sampler
from quorate.engines import Engine, Local, Ray, Simulated
from quorate.errors import (
    BadInput,
    Diverged,
    LearnerLost,
    PolicyFailed,
    ProcessLost,
    QuorateError,
    QuorumLost,
    ReplayMismatch,
    WorkerFailed,
)
from quorate.latency import Latency
from quorate.measuring import measure
from quorate.metrics import Metrics, metrics_of
from quorate.policies import *  # noqa: F403 # a new policy is public with its line there
from quorate.run import VERSION, Progress, Result
from quorate.task import Task
from quorate.trace import Recorder, read_trace
from quorate.trace_replay import replay
from quorate.training import Interrupted, resume, train

if TYPE_CHECKING:
    from quorate.planning import Plan

__version__ = VERSION


def plan(
    *sources: str | Path,
    latency: str | Latency | None = None,
    machines: int | None = None,
    noise_scale: float | None = None,
    iterations: str | None = None,
    batch_size: int | None = None,
    model_bytes: int | None = None,
    late: str | None = None,
    interval: float = 0.05,
    what_if: Sequence[str] = (),
    seed: int = 0,
) -> Plan:
    """Find the split of the machines into a quorum and backups that reaches a target soonest.

    sources: the trace or the folder of a run, or CSV files of step times; leave them out to give `latency` instead.
    latency: a latency model or its text.
    machines: number of machines (default: as many as were measured).
    noise_scale: the gradient noise scale in samples.
    iterations: updates to the target, as "QUORUM:THOUSANDS,…"; an alternative to `noise_scale`.
    batch_size, model_bytes: samples in a worker's batch and size of the parameters (default: from the trace).
    late: "cancel" late work or let it "finish" (default: as in the trace, else cancel).
    interval: requested half-width of the 95 % interval, as a share of the mean.
    what_if: changed conditions to plan again for, e.g. "machines=200", "without=3", "bandwidth=1Gbps".
    """
    from quorate.planning import plan as make_plan  # imported here, because it needs numpy and scipy

    return make_plan(
        *sources,
        latency=latency,
        machines=machines,
        noise_scale=noise_scale,
        iterations=iterations,
        batch_size=batch_size,
        model_bytes=model_bytes,
        late=late,
        interval=interval,
        what_if=what_if,
        seed=seed,
    )


__all__ = [
    "BadInput",
    "DataParallel",
    "Diverged",
    "Engine",
    "Interrupted",
    "Latency",
    "LearnerLost",
    "Local",
    "Metrics",
    "PolicyFailed",
    "ProcessLost",
    "Progress",
    "QuorateError",
    "QuorumLost",
    "Ray",
    "Receipt",
    "Recorder",
    "ReplayMismatch",
    "Result",
    "Sampler",
    "Simulated",
    "Task",
    "WorkerFailed",
    "__version__",
    "measure",
    "metrics_of",
    "plan",
    "read_trace",
    "replay",
    "resume",
    "train",
]
__all__ += policies.__all__
