"""When a worker that fails again and again ends the run: where another try would be no use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quorate.errors import WorkerFailed

#: A worker that fails so often without one answer in between ends the run; so does a batch that fails so often.
FAILURES_ALLOWED = 3
#: So often where they were killed, which may be chance.
DEATHS_ALLOWED = 8
_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.1, 5.0


class Failures:
    """Counts what went wrong, and raises WorkerFailed when it is enough."""

    def __init__(self) -> None:
        self._failed_batches: Counter[int] = Counter()
        self._deaths_at: Counter[int] = Counter()

    def at_batch(self, worker: int, batch: int, in_a_row: int, text: str) -> None:
        """A worker met an exception, the so-manyeth in a row."""
        self._failed_batches[batch] += 1
        times = max(self._failed_batches[batch], in_a_row)
        if times >= FAILURES_ALLOWED:
            raise WorkerFailed(f"worker {worker} failed at batch {batch}, {_often(times)}:\n{text}")

    def at_start(self, worker: int, in_a_row: int, told: str | None, how_it_ended: Callable[[], str]) -> None:
        """A worker did not even get ready; what it said of it, if anything."""
        if in_a_row >= (DEATHS_ALLOWED if told is None else FAILURES_ALLOWED):
            why = told if told is not None else f"its process {how_it_ended()}"
            raise WorkerFailed(f"worker {worker} cannot start, {_often(in_a_row)}:\n{why}")

    def died(self, worker: int, batch: int, how_it_ended: Callable[[], str]) -> None:
        """A worker died while it had this batch."""
        self._deaths_at[batch] += 1
        times = self._deaths_at[batch]
        if times >= DEATHS_ALLOWED:
            raise WorkerFailed(f"{times} workers died at batch {batch}; the last, worker {worker}, {how_it_ended()}")


def back_off_s(in_a_row: int) -> float:
    """How long to wait before the next try."""
    return 0.0 if in_a_row <= 1 else min(_LONGEST_BACK_OFF_S, _BACK_OFF_S * 2 ** (in_a_row - 2))


def _often(times: int) -> str:
    return "once" if times == 1 else f"{times} times"
