"""The public names. `quorate` itself gives them when the first one is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.engines import Engine, Local, Ray, Simulated
from quorate.engines.collective.receipts import Receipt
from quorate.errors import (
    BadInput,
    Diverged,
    LearnerLost,
    ProcessLost,
    QuorateError,
    QuorumLost,
    ReplayMismatch,
    WorkerFailed,
)
from quorate.faults import Fault, Faults, parse_faults
from quorate.latency import Latency, parse_latency
from quorate.learner import Learning
from quorate.measuring import Measuring, measure
from quorate.metrics import Metrics, metrics_of
from quorate.network import Network, parse_network
from quorate.parallel.data_parallel import DataParallel
from quorate.parallel.sampler import Sampler
from quorate.policies import (
    AdaptiveBackup,
    Async,
    BackupSync,
    BoundedStaleness,
    Deadline,
    Delayed,
    FullSync,
    KBatchSync,
    Policy,
    SoftSync,
    make_policy,
)
from quorate.replaying import Replay, replay
from quorate.running import VERSION, Progress, Result
from quorate.task import Task, load_task
from quorate.trace import Recorder, read_trace
from quorate.training import Interrupted, resume, train

if TYPE_CHECKING:
    from quorate.planning import Plan

__version__ = VERSION


def plan(*sources: str | Path, **options: Any) -> Plan:
    """How many backups to take: `quorate.planning.plan`, imported late because it needs numpy and scipy.

    sources: the trace or the folder of a run, or CSV files of step times; or none, and `latency="…"`, `machines=…`.
    """
    from quorate.planning import plan as make_plan

    return make_plan(*sources, **options)


__all__ = [
    "AdaptiveBackup",
    "Async",
    "BackupSync",
    "BadInput",
    "BoundedStaleness",
    "DataParallel",
    "Deadline",
    "Delayed",
    "Diverged",
    "Engine",
    "Fault",
    "Faults",
    "FullSync",
    "Interrupted",
    "KBatchSync",
    "Latency",
    "LearnerLost",
    "Learning",
    "Local",
    "Measuring",
    "Metrics",
    "Network",
    "Policy",
    "ProcessLost",
    "Progress",
    "QuorateError",
    "QuorumLost",
    "Ray",
    "Receipt",
    "Recorder",
    "Replay",
    "ReplayMismatch",
    "Result",
    "Sampler",
    "Simulated",
    "SoftSync",
    "Task",
    "WorkerFailed",
    "__version__",
    "load_task",
    "make_policy",
    "measure",
    "metrics_of",
    "parse_faults",
    "parse_latency",
    "parse_network",
    "plan",
    "read_trace",
    "replay",
    "resume",
    "train",
]
