"""Reads from a trace how long each worker's tickets took, or at least took."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quorate.errors import BadInput
from quorate.schema import SCHEMA, why_not_readable

Duration = tuple[float, bool]
"""(seconds, observed): where not observed, the ticket ended early and would have taken longer than this."""

Event = dict[str, Any]


def read_durations(path: str) -> dict[int, list[Duration]]:
    """Per worker its ended tickets, in the order in which they started; those still running are left out."""
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
                # A cancelled ticket that arrives all the same has shown its full time.
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
    """The events after the header, each with the words that say where it stands."""
    number = 0
    try:
        given = Path(path)
        with (given / "trace.jsonl" if given.is_dir() else given).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"trace {path!r}, line {number}"
                try:
                    event = json.loads(line)
                except json.JSONDecodeError as error:
                    if number == 1:
                        raise _foreign(where) from None
                    raise BadInput(
                        f"{where} is torn or damaged ({error.msg}); delete the file from this line on "
                        "to use what comes before"
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
    if isinstance(time_s, bool) or not isinstance(time_s, int | float) or not math.isfinite(time_s):
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
