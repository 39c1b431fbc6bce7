"""Quorate: distributed PyTorch training on slow, uneven or dying workers.

The core imports with torch and the standard library alone. Names are imported when first used, so that
`quorate --help` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorate.engines import Engine, Simulated
    from quorate.errors import BadInput, Diverged, QuorateError, QuorumLost, ReplayMismatch
    from quorate.faults import Fault, Faults, parse_faults
    from quorate.latency import Latency, parse_latency
    from quorate.learner import Learning
    from quorate.metrics import Metrics, metrics_of
    from quorate.network import Network, parse_network
    from quorate.policies import (
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
    from quorate.task import Task, load_task
    from quorate.trace import Recorder, read_trace
    from quorate.training import VERSION as __version__  # noqa: N811
    from quorate.training import Progress, Result, train

__all__ = [
    "Async",
    "BackupSync",
    "BadInput",
    "BoundedStaleness",
    "Deadline",
    "Delayed",
    "Diverged",
    "Engine",
    "Fault",
    "Faults",
    "FullSync",
    "KBatchSync",
    "Latency",
    "Learning",
    "Metrics",
    "Network",
    "Policy",
    "Progress",
    "QuorateError",
    "QuorumLost",
    "Recorder",
    "Replay",
    "ReplayMismatch",
    "Result",
    "Simulated",
    "SoftSync",
    "Task",
    "__version__",
    "load_task",
    "make_policy",
    "metrics_of",
    "parse_faults",
    "parse_latency",
    "parse_network",
    "read_trace",
    "replay",
    "train",
]

_HOMES = {
    "quorate.engines": (
        "Engine",
        "Simulated",
    ),
    "quorate.errors": (
        "BadInput",
        "Diverged",
        "QuorateError",
        "QuorumLost",
        "ReplayMismatch",
    ),
    "quorate.faults": (
        "Fault",
        "Faults",
        "parse_faults",
    ),
    "quorate.latency": (
        "Latency",
        "parse_latency",
    ),
    "quorate.learner": ("Learning",),
    "quorate.metrics": (
        "Metrics",
        "metrics_of",
    ),
    "quorate.network": (
        "Network",
        "parse_network",
    ),
    "quorate.policies": (
        "Async",
        "BackupSync",
        "BoundedStaleness",
        "Deadline",
        "Delayed",
        "FullSync",
        "KBatchSync",
        "Policy",
        "SoftSync",
        "make_policy",
    ),
    "quorate.replaying": (
        "Replay",
        "replay",
    ),
    "quorate.task": (
        "Task",
        "load_task",
    ),
    "quorate.trace": (
        "Recorder",
        "read_trace",
    ),
    "quorate.training": (
        "__version__",
        "Progress",
        "Result",
        "train",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'quorate' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), "VERSION" if name == "__version__" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
