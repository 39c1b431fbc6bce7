"""Warns of a hang: a process that waits for long asks the other processes for their state and reports it."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from quorate.checkpoint_schedule import warn
from quorate.data_parallel.iterations import Iterations
from quorate.data_parallel.sampler import Sampler

#: Seconds in one call of Quorate after which a process asks the other processes.
LONG_S = 30.0

#: The call in which the script's thread waits, and since when (time.monotonic); None if it does not wait.
Waits = Callable[[], tuple[str, float] | None]


class HangWarning:
    """Asks all processes for their state when this one has waited for `limit_s`, and warns if none of them computes.

    A process computes if it began an iteration within `limit_s`, or within three times its longest iteration.
    The link's thread calls `beat` about once a second, and `heard` with each message.
    """

    def __init__(self, worker: int, workers: int, waits: Waits, send: Callable[..., None], limit_s: float) -> None:
        self._worker, self._waits, self._send, self._limit_s = worker, waits, send, limit_s
        self._others = [other for other in range(workers) if other != worker]
        self._began_at, self._longest_s = monotonic(), 0.0
        self._asked_at = 0.0
        self._answers: dict[int, dict[str, Any]] | None = None  # None: no question is open
        self._warned_for = 0.0  # start of the wait of the last warning

    def began(self) -> None:
        """The script has begun an iteration."""
        self._began_at = monotonic()

    def ended(self) -> None:
        """The script has ended its iteration."""
        self._longest_s = max(self._longest_s, monotonic() - self._began_at)

    def beat(self) -> None:
        """If this process waits for long, ask the other processes, or evaluate their answers."""
        waits, now = self._waits(), monotonic()
        if waits is None or now - waits[1] < self._limit_s or waits[1] == self._warned_for:
            self._answers = None
        elif self._answers is None or now - self._asked_at >= self._limit_s:
            self._answers, self._asked_at = {}, now
            self._send("stalled")
        elif len(self._answers) == len(self._others):
            self._evaluate(*waits, self._answers)

    def heard(self, message: dict[str, Any]) -> None:
        """Answer a question, or note an answer."""
        if message["kind"] == "stalled" and message["worker"] != self._worker:
            waits, idle_s = self._waits(), monotonic() - self._began_at
            computes = idle_s < max(self._limit_s, 3 * self._longest_s)
            where = None if waits is None else waits[0]
            self._send("doing", to=message["worker"], where=where, idle_s=idle_s, computes=computes)
        elif message["kind"] == "doing" and message["to"] == self._worker and self._answers is not None:
            self._answers[message["worker"]] = message

    def _evaluate(self, where: str, since: float, answers: dict[int, dict[str, Any]]) -> None:
        if any(answer["computes"] and answer["where"] is None for answer in answers.values()):
            return  # that process is only slow; all are asked again later
        away = [worker for worker in self._others if answers[worker]["where"] is None]
        waiting = [
            f"rank {worker} waits in {answers[worker]['where']}" for worker in self._others if worker not in away
        ]
        self._warned_for = since
        wait = f"process {self._worker} has waited {monotonic() - since:.0f} s in {where}, and no process computes: "
        if away:
            many = len(away) > 1
            idle_s = min(answers[worker]["idle_s"] for worker in away)
            waiting.append(
                f"rank{'s' * many} {', '.join(map(str, away))} {'have' if many else 'has'} begun no iteration for "
                f"{idle_s:.0f} s, and probably wait{'s' * (not many)} for the others in a collective of the script "
                "(dist.barrier(), all_reduce, gather, a checkpoint)"
            )
        warn(
            f"{wait}{'; '.join(waiting)}. Call model.meet() in every process before such a collective, and equally "
            "often in all of them; in loops that count use: for step in model.steps(…, meet_every=…)"
        )


def where_it_waits(driver: Iterations, sampler: Sampler | None) -> tuple[str, float] | None:
    """Where the script's thread waits for other processes, and since when."""
    if driver.plane.waits_since is not None:
        return driver.where, driver.plane.waits_since
    if sampler is not None and sampler.waits_since is not None:
        return "the loop over the loader", sampler.waits_since
    return None
