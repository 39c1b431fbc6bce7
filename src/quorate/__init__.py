"""Quorate: distributed PyTorch training on slow, uneven or dying workers.

Run
    train               train a task under a policy on an engine
    resume              continue an interrupted run from its newest checkpoint
    replay              run a recorded trace again, and compare every decision and parameter
    plan                recommend a number of backups, from a run, step times or a latency model
    DataParallel        replaces DistributedDataParallel in a torchrun script
    Sampler             hands out batches for DataParallel, so that each sample counts once an epoch
    measure             measure the step times of a script that trains with another library

Policies: which gradients make an update
    FullSync            one gradient of every worker
    BackupSync          the first `quorum` gradients of the version
    KBatchSync          any `quorum` gradients of the version
    AdaptiveBackup      the first gradients, with the quorum that makes the most progress a second
    Deadline            the gradients that have arrived at the quorum, or when time is up
    Delayed             one gradient of every worker, computed `delay` versions back
    Async               every gradient as it arrives
    SoftSync            every `quorum` arrivals, of any staleness
    BoundedStaleness    every gradient; no worker starts more than `bound` steps ahead of the slowest
    Policy              base class for a policy of your own (docs/extending.md)
    RoundPolicy         base class for a policy that works in rounds
    ArrivalPolicy       base class for a policy whose workers never wait

Engines: where the workers run
    Local               processes of this machine
    Ray                 actors on a Ray cluster
    Simulated           simulated workers in virtual time
    Engine              base class of all three

Base classes of what a run is given (docs/extending.md)
    Task                model, data, loss and optimizer
    Latency             how long a ticket takes
    Recorder            an observer that hears every event of a run

Results
    Result              the outcome of a run: parameters, metrics, summary
    Progress            the progress of a run, for a progress bar
    Receipt             whether a gradient was used, from `optimizer.step()` under DataParallel
    Metrics             totals, times and curves of a run, computed from its trace
    metrics_of          the metrics of a recorded run
    read_trace          the records of a trace, one by one

Errors
    QuorateError        base class of all errors
    BadInput            a value breaks a rule
    Interrupted         a signal ended the run, which can be resumed
    QuorumLost          too few workers are left
    WorkerFailed        workers fail again and again
    LearnerLost         a part of the newest version is gone
    ProcessLost         a process of a torchrun script is gone
    PolicyFailed        a policy asked for something impossible
    Diverged            gradient after gradient held NaN or Inf
    ReplayMismatch      a replay decided otherwise than its trace

Using the first of these names imports all of them, so `quorate --help` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorate._public import *  # noqa: F403
    from quorate._public import __version__ as __version__


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")} - {"Any", "TYPE_CHECKING", "annotations", "import_module"})


def __getattr__(name: str) -> Any:
    if name in ("__version__", "__all__") or not name.startswith("_"):  # private names are submodules
        public = import_module("quorate._public")
        globals().update({one: getattr(public, one) for one in public.__all__}, __all__=public.__all__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'quorate' has no attribute {name!r}")
