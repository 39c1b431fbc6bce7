"""Latencies from the trace of an earlier run or a table of step times, to simulate existing workers."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, ClassVar

from quorate.errors import BadInput
from quorate.latency.base import Draw, Latency
from quorate.latency.step_times import is_table, read_step_times
from quorate.schema import SCHEMA, why_not_readable
from quorate.seeds import derive, uniform

Duration = tuple[float, bool]
"""(seconds, observed). Not observed: the ticket ended early and would have taken longer (right-censored)."""

Event = dict[str, Any]


def read_durations(path: str) -> dict[int, list[Duration]]:
    """The durations of each worker's ended tickets, in the order of their start."""
    started: dict[int | str, tuple[float, int]] = {}
    workers: list[int] = []
    ended: list[Duration | None] = []
    for where, event in _events(path):
        kind = event.get("event")
        if kind == "start":
            started[_ticket(where, event.get("ticket"))] = (_time(where, event), len(workers))
            workers.append(_worker(where, event))
            ended.append(None)
        elif kind in ("arrive", "cancel", "lost"):
            time_s = _time(where, event)
            for ticket in _tickets(where, event) if kind == "lost" else [_ticket(where, event.get("ticket"))]:
                if ticket not in started:
                    raise _bad(where, f"ends ticket {ticket!r}, which never started")
                start_s, slot = started[ticket]
                if time_s < start_s:
                    raise _bad(where, f"ends ticket {ticket!r} at {time_s} s, but it started at {start_s} s")
                # A cancelled ticket may still arrive; then its full duration is known.
                if kind == "arrive" or ended[slot] is None:
                    ended[slot] = (time_s - start_s, kind == "arrive")
    durations: dict[int, list[Duration]] = {}
    for worker, duration in zip(workers, ended, strict=True):
        if duration is not None:
            durations.setdefault(worker, []).append(duration)
    if not any(observed for ends in durations.values() for _, observed in ends):
        raise BadInput(
            f"trace {path!r} holds {len(workers)} started tickets up to its last line and none that arrived; "
            "record a longer run"
        )
    return durations


def _events(path: str) -> Iterator[tuple[str, Event]]:
    """The events after the header, each with its position in words for error messages."""
    number = 0
    try:
        given = Path(path)
        with (given / "trace.jsonl" if given.is_dir() else given).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"trace {path!r}, line {number}"
                try:
                    event = json.loads(line)
                except (ValueError, RecursionError) as error:  # ValueError also for numbers of thousands of digits
                    if number == 1:
                        raise _foreign(where) from None
                    raise BadInput(
                        f"{where} is torn or damaged ({str(error).partition(':')[0]}); "
                        "delete the file from this line on to use what comes before"
                    ) from None
                if number == 1:
                    _check_header(where, event)
                elif not isinstance(event, dict):
                    raise _bad(where, "is no event object")
                else:
                    yield where, event
    except OSError as error:
        raise BadInput(
            f"trace {path!r} cannot be read ({error.strerror}); give the path of a file that quorate wrote"
        ) from None
    except UnicodeDecodeError:
        raise _foreign(f"trace {path!r}, after line {number},") from None
    if number == 0:
        raise BadInput(f"trace {path!r} is empty: line 1 should be its header; give one that quorate wrote")


def _check_header(where: str, event: object) -> None:
    if not isinstance(event, dict) or event.get("event") != "run" or type(event.get("schema")) is not int:
        raise _foreign(where)
    wrong = why_not_readable(event["schema"])
    if wrong is not None:
        raise BadInput(f"{where} {wrong}")


def _foreign(where: str) -> BadInput:
    header = f'{{"event": "run", "schema": {SCHEMA}, …}}'
    return BadInput(f"{where} is not from a quorate trace, whose line 1 is {header}; give one that quorate wrote")


def _bad(where: str, what: str) -> BadInput:
    return BadInput(f"{where} {what}; the file was changed or mixed with another, give it as it was written")


def _time(where: str, event: Event) -> float:
    time_s = event.get("time")
    if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not abs(time_s) < 1e30:
        raise _bad(where, f"has {time_s!r} for its time, which is not a finite number of seconds")
    return float(time_s)


def _worker(where: str, event: Event) -> int:
    worker = event.get("worker")
    if type(worker) is not int or worker < 0:
        raise _bad(where, f"has {worker!r} for its worker, which is not a number from 0 up")
    return worker


def _ticket(where: str, ticket: object) -> int | str:
    if not isinstance(ticket, int | str):
        raise _bad(where, f"has {ticket!r} for a ticket, which is not an id")
    return ticket


def _tickets(where: str, event: Event) -> list[int | str]:
    tickets = event.get("tickets")
    if not isinstance(tickets, list):
        raise _bad(where, f"has {tickets!r} for its tickets, which is not a list of ids")
    return [_ticket(where, ticket) for ticket in tickets]


class _KaplanMeier:
    """The Kaplan-Meier estimate of the durations, to draw a full duration for a censored ticket.

    Each censored duration passes its weight to all longer durations (Efron 1967), which gives exactly the
    product-limit estimate. `draw` conditions it on "longer than c".
    """

    def __init__(self, durations: Iterable[Duration]) -> None:
        # Observed before censored at equal durations: a ticket cancelled at t lasted longer than one that ended at t.
        pool = sorted(durations, key=lambda duration: (duration[0], not duration[1]))
        share = 1.0
        weights: list[float] = []
        self._observed: list[float] = []
        for i, (seconds, observed) in enumerate(pool):
            if observed:
                weights.append(share / (len(pool) - i))
                self._observed.append(seconds)
                share -= weights[-1]
        self._up_to = list(accumulate(weights, initial=0.0))

    def draw(self, longer_than_s: float, u: float) -> float:
        first = bisect_right(self._observed, longer_than_s)
        if first == len(self._observed):
            return longer_than_s
        done, end = self._up_to[first], self._up_to[-1]
        i = bisect_right(self._up_to, done + u * (end - done), lo=first + 1)
        return self._observed[min(i - 1, len(self._observed) - 1)]


@dataclass(frozen=True)
class Recorded(Latency):
    """Worker w's i-th ticket takes as long as in the trace; after the last ticket the trace starts over.

    For a cancelled or lost ticket the trace only gives a lower bound. Its time is drawn from the longer times of all
    workers, with Kaplan-Meier weights. A worker that is not in the trace uses the times of a recorded worker, from
    another starting point.
    """

    name: ClassVar[str] = "trace"
    form: ClassVar[str] = "trace:PATH"
    example: ClassVar[str] = "trace:runs/monday.jsonl or trace:times.csv"
    path: str
    durations: dict[int, list[Duration]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.path or self.path != self.path.strip() or "*" in self.path:
            raise BadInput(
                f"{self.path!r} is no path for a trace: it must not be empty, begin or end with a space, "
                f"or hold '*', which joins modifiers; rename the file and {self.usage()}"
            )
        path = Path(self.path)
        object.__setattr__(self, "durations", _of_table(path) if is_table(path) else read_durations(self.path))

    def sampler(self, seed: int, workers: int) -> Draw:
        estimate = _KaplanMeier(chain.from_iterable(self.durations.values()))
        tables: dict[int, list[float]] = {}
        for worker, durations in self.durations.items():
            key = derive(seed, "latency.censored", worker)
            tables[worker] = [
                seconds if observed else estimate.draw(seconds, uniform(key, i))
                for i, (seconds, observed) in enumerate(durations)
            ]
        known = sorted(tables)
        donors = [worker if worker in tables else known[worker % len(known)] for worker in range(workers)]
        seconds_of = [tables[donor] for donor in donors]
        counts = [len(table) for table in seconds_of]
        # A worker with the times of another starts at another ticket; otherwise both would be slow at the same time.
        begins = [
            0 if worker == donor else derive(seed, "latency.borrowed", worker) % counts[worker]
            for worker, donor in enumerate(donors)
        ]

        def draw(worker: int, step: int, _row: int, _time_s: float) -> float:
            return seconds_of[worker][(step + begins[worker]) % counts[worker]]

        return draw

    def longest(self) -> float:
        return max(seconds for durations in self.durations.values() for seconds, _ in durations)

    def text(self) -> str:
        return f"trace:{self.path}"


def _of_table(path: Path) -> dict[int, list[Duration]]:
    """The step times of each worker, all of which are observed."""
    durations: dict[int, list[Duration]] = {}
    for row in read_step_times([path]).times.values():
        for worker, seconds in row.items():
            durations.setdefault(worker, []).append((seconds, True))
    return durations
