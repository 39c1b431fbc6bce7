"""Health of workers: timeouts for silent ones, warnings about failures, and when to give up."""

from __future__ import annotations

import math
import warnings
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from quorate.errors import WorkerFailed

_REMEMBERED = 256  # answers
_BEFORE_ANY_S = 3.0  # assumed time of an answer before the first one
#: Lower bound of the user's patience_s: a busy machine may starve a process for seconds.
_LEAST_PATIENCE_S = 5.0


class SilenceLimits(NamedTuple):
    """Timeouts in seconds after which a worker counts as lost, by the state of its process."""

    stopped: float  # the process is stopped (SIGSTOP)
    silent: float  # the process waits and uses no CPU
    hanging: float  # the process still uses CPU


class AnswerTimes:
    """Recent times from an order to its answer, from which timeouts are learned.

    patience_s: upper bound of every timeout, unless answers themselves take that long.
    """

    def __init__(self, patience_s: float = math.inf) -> None:
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self._slowest = _BEFORE_ANY_S
        self._patience_s = max(_LEAST_PATIENCE_S, patience_s)

    def add(self, seconds: float) -> None:
        recent = self._recent
        leaving = recent[0] if len(recent) == _REMEMBERED else None
        recent.append(seconds)
        if len(recent) == 1 or seconds >= self._slowest:
            self._slowest = seconds
        elif leaving == self._slowest:
            self._slowest = max(recent)

    def limits(self, warm: bool = True) -> SilenceLimits:
        """Multiples of the slowest recent answer, plus constants for a machine that is busy with other things.

        A worker is warm after its first answer. Before, it has more to do: compile, load, initialise.
        """
        slowest = self._slowest
        usual = slowest if warm else max(slowest, _BEFORE_ANY_S)
        longest = max(self._patience_s, 1 + 3 * slowest) if self._recent else self._patience_s
        learned = 0.25 + 3 * slowest, 10 + 50 * usual, 60 + 200 * usual
        return SilenceLimits(*(min(limit, longest) for limit in learned))


#: The run ends after this number of failures of one worker in a row, or of one batch.
FAILURES_ALLOWED = 3
#: Higher limit for killed workers: a kill may be unrelated to the task.
DEATHS_ALLOWED = 8
_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.1, 5.0


class Failures:
    """Counts failures, warns of the first of each kind, and raises WorkerFailed if a retry cannot help.

    in_a_row: failures of the worker since its last answer.
    """

    def __init__(self) -> None:
        self._failed_batches: Counter[int] = Counter()
        self._deaths_at: Counter[int] = Counter()
        self._hangs_at: Counter[int] = Counter()
        self._shown: set[object] = set()

    def at_batch(self, worker: int, batch: int, in_a_row: int, text: str) -> None:
        """A worker raised an exception."""
        self._failed_batches[batch] += 1
        times = max(self._failed_batches[batch], in_a_row)
        if times >= FAILURES_ALLOWED:
            raise WorkerFailed(f"worker {worker} failed at batch {batch}, {_often(times)}:\n{text}")
        self._show_exception(text, f"worker {worker} failed at batch {batch}, which is computed again")

    def at_start(self, worker: int, in_a_row: int, told: str | None, how_it_ended: Callable[[], str]) -> None:
        """A worker ended before it was ready; `told` is its exception, if it sent one."""
        if in_a_row >= (DEATHS_ALLOWED if told is None else FAILURES_ALLOWED):
            why = told if told is not None else f"its process {how_it_ended()}"
            raise WorkerFailed(f"worker {worker} cannot start, {_often(in_a_row)}:\n{why}")
        if told is not None:
            self._show_exception(told, f"worker {worker} failed while it started, and is started again")

    def hung(self, worker: int, batch: int, in_a_row: int, why: str) -> None:
        """A worker was killed because it did not answer; `batch` is the one it computed (-1: it was starting)."""
        self._hangs_at[batch] += 1
        times = max(self._hangs_at[batch], in_a_row)
        where = "while it started" if batch < 0 else f"at batch {batch}"
        if times >= FAILURES_ALLOWED:
            raise WorkerFailed(
                f"worker {worker} hung {where}, {_often(times)}; the last time {why}; "
                f"a task that only is slow needs more patience (patience_s, --patience)"
            )
        self._show_first("hung", f"worker {worker} hung {where}: {why}; it was killed, and another takes its place")

    def died(self, worker: int, batch: int, how_it_ended: Callable[[], str], *, expected: bool) -> None:
        """A worker died at this batch. expected: a fault script killed it, or its node was lost."""
        self._deaths_at[batch] += 1
        times = self._deaths_at[batch]
        if times >= DEATHS_ALLOWED:
            raise WorkerFailed(
                f"workers died at batch {batch}, {_often(times)}; the last one, worker {worker}, {how_it_ended()}"
            )
        if not expected and "died" not in self._shown:  # how_it_ended() may take a moment
            self._show_first("died", f"worker {worker} {how_it_ended()} at batch {batch}, which is computed again")

    def has_shown_hang(self) -> bool:
        return "hung" in self._shown

    def _show_exception(self, text: str, sentence: str) -> None:
        """Exceptions are of one kind if their type and the line that raises them are the same."""
        lines = text.splitlines()
        frame = max((number for number, line in enumerate(lines) if line.startswith("  File ")), default=0)
        raised = next((line for line in lines[frame:] if line and not line.startswith(" ")), text)
        place = lines[frame].strip() if lines else ""
        self._show_first((place, raised.partition(":")[0]), f"{sentence}: {raised} ({place})")

    def _show_first(self, kind: object, sentence: str) -> None:
        if kind not in self._shown:
            self._shown.add(kind)
            warnings.warn(f"{sentence}; others of this kind are only counted", RuntimeWarning, stacklevel=2)


def back_off_s(in_a_row: int) -> float:
    """Seconds to wait before the next restart: exponential back-off."""
    return 0.0 if in_a_row <= 1 else min(_LONGEST_BACK_OFF_S, _BACK_OFF_S * 2 ** (in_a_row - 2))


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"
