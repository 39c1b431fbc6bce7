"""What is left of a run that a signal or its workers ended, and how to go on with it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quorate.cli._progress import Reporter
from quorate.cli._signals import INTERRUPTED, TERMINATED, Stopped, Terminated
from quorate.errors import LearnerLost, QuorumLost, WorkerFailed
from quorate.trace import TRACE_FILE

NO_UPDATE = "before the first update"


@contextmanager
def telling_what_is_left(label: str, reporter: Reporter, out: Path | None, again: str = "") -> Iterator[None]:
    """Let a run that does not come to its end say where it was and how to go on.

    again: options that the command to go on needs, since they are not recorded.
    """
    from quorate import Interrupted

    try:
        yield
    except Interrupted as ended:
        metrics = ended.result.metrics
        where = f"after update {metrics.updates:,} ({metrics.seconds:.4g} s)" if metrics.updates else NO_UPDATE
        status = TERMINATED if ended.signal == "SIGTERM" else INTERRUPTED
        raise Stopped(f"stopped {label} {where}; {_what_is_left(out, again, real=True)}", status) from None
    except (KeyboardInterrupt, Terminated) as signal:
        by_sigterm = isinstance(signal, Terminated) or signal.args == ("SIGTERM",)
        status = TERMINATED if by_sigterm else INTERRUPTED
        raise Stopped(
            f"stopped {label} {_how_far(reporter)}; {_what_is_left(out, again, reporter.real)}", status
        ) from None
    except (QuorumLost, WorkerFailed, LearnerLost) as error:
        if out is not None and _last_checkpoint(out) is not None:
            error.add_note(f"to go on: {command_to_go_on(out, again)}")
        raise


def command_to_go_on(run: Path, again: str = "") -> str:
    return f"quorate train --resume {shlex.quote(str(run))}{again}"


def _how_far(reporter: Reporter) -> str:
    last = reporter.last
    if last is None:
        return NO_UPDATE
    return f"at update {last.updates:,} ({last.seconds:.4g} s{'' if reporter.real else ' virtual'})"


def _what_is_left(out: Path | None, again: str, real: bool) -> str:
    if out is None:
        return "nothing was recorded, since there was no --out"
    version = _last_checkpoint(out)
    if version is not None:
        return f"the checkpoint of update {version:,} is in {str(out)!r}; to go on: {command_to_go_on(out, again)}"
    trace = out / TRACE_FILE
    kept = f"the trace so far is in {str(trace)!r}" if trace.exists() else "nothing was written"
    return f"there is no checkpoint to go on from, {kept}" if real else kept


def _last_checkpoint(out: Path) -> int | None:
    from quorate.checkpoint import CheckpointFolder

    return max(CheckpointFolder(out).versions(), default=None)
