"""The schema of a trace, and the check that every reader of traces uses.

A trace may come from an untrusted source, and may have been changed or torn. `parse_lines` turns lines into records,
and `TraceCheck` checks each record against the schema and against the records before it. A trace that passes is one
that quorate can have written, so readers need no checks of their own.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from quorate.noise import Norms

#: The schema that is written. 2 added to 1: norms and the noise scale of an update, and the choices of a policy.
SCHEMA = 2
#: The oldest schema that can be read.
OLDEST = 1
#: Upper limits of a run. A larger number in a trace is damage, and could take all memory or crash torch.
MOST_WORKERS, MOST_THREADS = 1_000_000, 1024
#: Cancelled tickets that are remembered for an "abandon" record. A simulated worker writes none; a real one soon does.
CANCELLED_KEPT = 100_000
#: By policy, the names of options in earlier traces and their current names.
RENAMED_OPTIONS = {
    "adaptive": {"least": "min_quorum"},
    "deadline": {"minimum": "min_quorum"},
    "k-batch": {"k": "quorum"},
    "softsync": {"gradients": "quorum"},
}

_LONGEST_S = 1e30
_DEEPEST = 8  # levels of lists and dicts in the options of a policy or an engine
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Unfit(ValueError):  # noqa: N818
    """A record that quorate cannot have written; the message completes "line 7 …"."""


def why_not_readable(schema: object) -> str | None:
    """Why a trace of this schema cannot be read, and what to do about it; None if it can be read."""
    if type(schema) is int and OLDEST <= schema <= SCHEMA:
        return None
    older = type(schema) is int and schema < OLDEST
    remedy = "use the release that wrote it" if older else "upgrade quorate, or record the run with this one"
    return f"has schema {_shown(schema)}, but this quorate reads schemas {OLDEST} to {SCHEMA}; {remedy}"


def parse_lines(lines: bytes) -> list[dict[str, Any]]:
    """The records of whole lines; ValueError if a line is no record.

    All lines are parsed in one call, which is three times as fast as one by one. Lone surrogates, which JSON can
    escape but no file or terminal can encode, are replaced.
    """
    text = lines.removesuffix(b"\n").decode()
    try:
        records = json.loads("[" + text.replace("\n", ",") + "]")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if len(records) != text.count("\n") + 1:
        raise ValueError("some line is not one record")
    if not all(type(record) is dict and type(record.get("event")) is str for record in records):
        raise ValueError("some line is no record")
    if "\\ud" in text or "\\uD" in text:
        records = _encodable(records)
    return records  # type: ignore[no-any-return]


def _encodable(value: Any) -> Any:
    if type(value) is str:
        return _LONE_SURROGATE.sub("\ufffd", value)
    if type(value) is list:
        return [_encodable(item) for item in value]
    if type(value) is dict:
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


# ---------------------------------------------------------------- values

_ABSENT = object()
Check = Callable[[Any], bool]
Rule = tuple[Check, str]  # whether a value is valid, and a description of valid values


def _whole(least: int, below: int) -> Check:
    return lambda value: type(value) is int and least <= value < below


def _is_name(value: Any) -> bool:
    return type(value) is str and len(value) <= 200


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < 2**64)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and -_LONGEST_S < value < _LONGEST_S


def _is_plain(value: Any, depth: int = _DEEPEST) -> bool:
    """JSON of a reasonable depth and size."""
    if type(value) is list:
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if type(value) is dict:
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value.values())
    return value is None or type(value) in (str, bool) or _is_number(value)


def _or_none(rule: Rule) -> Rule:
    return (lambda value: value is None or rule[0](value)), f"{rule[1]} or null"


def _if_there(rule: Rule) -> Rule:
    return (lambda value: value is _ABSENT or rule[0](value)), rule[1]


def _shown(value: Any) -> str:
    text = f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


COUNT: Rule = (_whole(0, 2**63), "a whole number from 0 up")
POSITIVE: Rule = (_whole(1, 2**63), "a whole number from 1 up")
WORKER: Rule = (_whole(0, MOST_WORKERS), f"a number from 0 up, below {MOST_WORKERS:,}")
TIME: Rule = (lambda value: type(value) in (int, float) and 0 <= value < _LONGEST_S, "a number of seconds")
SPAN: Rule = (_is_finite, "a number of seconds")
NUMBER: Rule = (_is_number, "a number")
TEXT: Rule = (lambda value: type(value) is str, "a text")
FLAG: Rule = (lambda value: type(value) is bool, "true or false")
NUMBERS: Rule = (lambda value: type(value) is list and all(map(_is_finite, value)), "a list of numbers")
TICKETS: Rule = (lambda value: type(value) is list and all(map(COUNT[0], value)), "a list of tickets")
MEASURES: Rule = (lambda value: type(value) is dict and all(map(_is_number, value.values())), "numbers by name")
NORMS: Rule = (
    lambda value: type(value) is list and len(value) == len(Norms._fields) and all(map(_is_number, value)),
    "a list of four numbers",
)
_NAMED: Rule = (
    lambda value: type(value) is dict and _is_name(value.get("name")) and _is_plain(value),
    "an object with a name",
)
_LEARNING = ("clip_norm", "ema", "delay_compensation")


def _is_learning(value: Any) -> bool:
    return type(value) is dict and all(
        name in _LEARNING and (one is None or _is_finite(one)) for name, one in value.items()
    )


def _is_machine(value: Any) -> bool:
    return (
        type(value) is dict
        and all(POSITIVE[0](value.get(name)) for name in ("cores", "workers"))
        and _or_none(SPAN)[0](value.get("load"))
    )


_LIMITS = {"updates": _or_none(POSITIVE), "epochs": _or_none(POSITIVE), "until": _or_none(TEXT)}

#: By event, the rules for the fields that readers use.
EVENTS: dict[str, dict[str, Rule]] = {
    "run": {
        "policy": _NAMED,
        "engine": _NAMED,
        "task": _or_none(TEXT),
        "task_file": _if_there(_or_none(TEXT)),
        "workers": (_whole(1, MOST_WORKERS + 1), f"a number from 1 to {MOST_WORKERS:,}"),
        "seed": (_whole(-(2**63), 2**64), "a whole number of 64 bits"),
        "samples": _or_none(POSITIVE),
        "batch_size": POSITIVE,
        "batches": _if_there(TEXT),
        "learning": _if_there((_is_learning, "an object with " + ", ".join(_LEARNING))),
        **{name: _if_there(rule) for name, rule in _LIMITS.items()},
        "evaluate_every": _if_there(POSITIVE),
        **{name: _if_there(COUNT) for name in ("parameter_bytes", "first_version", "first_step", "processes")},
        "per_update": _if_there(_or_none(POSITIVE)),
        "rounds": _if_there(FLAG),
        "label": _if_there(TEXT),
        "machine": _if_there((_is_machine, "an object with cores and workers")),
    },
    "join": {"worker": WORKER, "incarnation": COUNT},
    "start": {
        **{"ticket": COUNT, "worker": WORKER, "incarnation": COUNT},
        **{"version": COUNT, "batch": COUNT, "samples": COUNT},
    },
    "exhausted": {"worker": WORKER},
    "pin": {"ticket": COUNT},
    "arrive": {"ticket": COUNT},
    "refuse": {"ticket": COUNT},
    "apply": {
        **{"version": COUNT, "tickets": TICKETS, "reason": TEXT, "weights": _if_there(NUMBERS)},
        **{"loss": _if_there(_or_none(NUMBER)), "norm": _if_there(_or_none(NUMBER)), "apply_s": _if_there(SPAN)},
        **{"norms": _if_there(NORMS), "noise_scale": _if_there(_or_none(NUMBER))},
    },
    "drop": {"ticket": COUNT, "reason": TEXT},
    "cancel": {"ticket": COUNT, "reason": TEXT},
    "abandon": {"ticket": COUNT, "cancel_s": SPAN},
    "lost": {"worker": WORKER, "tickets": TICKETS},
    "set-timer": {"at": SPAN, "key": NUMBER, "reason": TEXT},
    "timer": {"key": NUMBER},
    "choose": {"version": COUNT, "quorum": COUNT, "reason": TEXT},
    "evaluate": {"version": COUNT, "measures": MEASURES},
    "resume": {"version": COUNT, **_LIMITS},
    "end": {"version": COUNT, "reason": TEXT, "digest": _or_none(TEXT), "core_wait_s": _if_there(SPAN)},
}
#: Further fields that a header needs for the run to be replayed or resumed.
TO_RUN = ("learning", *_LIMITS, "evaluate_every", "parameter_bytes")
_PARTS = [(name, *SPAN) for name in ("data_s", "compute_s", "transfer_s")]
#: Optional fields of an engine or a policy in a header.
_DESCRIBED: dict[str, Rule] = {
    "threads": (_whole(1, MOST_THREADS + 1), f"a number from 1 to {MOST_THREADS}"),
    **{name: _or_none(TEXT) for name in ("device", "latency", "network", "faults", "wire", "arithmetic")},
    **{name: _or_none(TEXT) for name in ("source", "source_file")},
    "graphs": FLAG,
}
_FIELDS = {event: [("time", *TIME)] * (event != "run") + [(name, *rule) for name, rule in rules.items()]
           for event, rules in EVENTS.items()}  # fmt: skip


def _check_fields(record: dict[str, Any], rules: list[tuple[str, Check, str]]) -> None:
    for name, is_valid, description in rules:
        value = record.get(name, _ABSENT)
        if not is_valid(value):
            if value is _ABSENT:
                raise Unfit(f"does not say its {name}")
            raise Unfit(f"has {_shown(value)} for its {name}, which must be {description}")


def with_current_names(header: dict[str, Any]) -> dict[str, Any]:
    """The header of an earlier trace with the current names. A policy of a user's, which has a source, is unchanged."""
    policy, engine = header["policy"], header["engine"]
    renamed = {} if "source" in policy else RENAMED_OPTIONS.get(policy["name"], {})
    policy = {renamed.get(option, option): value for option, value in policy.items()}
    if engine.get("arithmetic") == "abreast":
        engine = {**engine, "arithmetic": "vmapped"}
    return {**header, "policy": policy, "engine": engine}


# ---------------------------------------------------------------- records in their order


class TraceCheck:
    """Checks the records of one trace, in their order, against the schema and against each other."""

    def __init__(self) -> None:
        self.records = 0
        self.has_ended = False
        self._time, self._version, self._last_ticket = 0.0, 0, -1
        self._live: set[int] = set()
        self._flying: dict[int, int] = {}  # worker -> its ticket
        self._worker: dict[int, int] = {}  # ticket that has not ended -> its worker
        self._cancelled: OrderedDict[int, None] = OrderedDict()

    def take(self, record: dict[str, Any]) -> None:
        """Check the next record; raises `Unfit` if it cannot follow the records before it.

        A header of an earlier trace is given the current names.
        """
        event = record["event"]
        rules = _FIELDS.get(event)
        if rules is None:
            raise Unfit(f"is the event {_shown(event)}, which schema {SCHEMA} does not have")
        if self.has_ended:
            raise Unfit("goes on after its end")
        if (event == "run") != (self.records == 0):
            raise Unfit("begins another run")
        _check_fields(record, rules)
        if event == "run":
            if not _is_plain(record):
                raise Unfit("is nested too deeply, or holds a number that is too large")
            for described in (record["engine"], record["policy"]):
                _check_fields(described, [(name, *rule) for name, rule in _DESCRIBED.items() if name in described])
            record.update(with_current_names(record))
        else:
            if record["time"] < self._time:
                raise Unfit(f"goes back in time, from {self._time!r} s to {record['time']!r} s")
            self._time = record["time"]
            self._follow(event, record)
        self.records += 1

    def _follow(self, event: str, record: dict[str, Any]) -> None:
        ticket, worker = record.get("ticket", -1), record.get("worker", -1)
        if event == "start":
            _must(ticket > self._last_ticket, "starts a ticket again")
            _must(worker in self._live and worker not in self._flying, "starts a worker that is not free")
            _must(record["version"] <= self._version, "starts from a version that is not made")
            self._last_ticket = ticket
            self._flying[worker] = ticket
            self._worker[ticket] = worker
        elif event == "arrive":
            self._land(ticket)
            if "compute_s" in record:
                _check_fields(record, _PARTS)
        elif event == "apply":
            _must(record["version"] == self._version + 1, "makes a version that is not the next")
            _must(
                len(record.get("weights", record["tickets"])) == len(record["tickets"]),
                "lacks a weight for each ticket",
            )
            self._version += 1
            self._end(*record["tickets"])
        elif event == "cancel":
            self._land(ticket)
            self._end(ticket)
            self._cancelled[ticket] = None
            if len(self._cancelled) > CANCELLED_KEPT:
                self._cancelled.popitem(last=False)
        elif event == "drop":
            self._end(ticket)
        elif event == "refuse":
            if self._flying.get(self._worker.get(ticket, -1)) == ticket:
                self._land(ticket)
            self._end(ticket)
        elif event == "abandon":
            _must(ticket in self._cancelled, "abandons a ticket that was not cancelled")
            del self._cancelled[ticket]
        elif event == "join":
            _must(worker not in self._live, "lets a live worker join again")
            self._live.add(worker)
        elif event == "lost":
            _must(worker in self._live, "loses a worker that is not there")
            self._live.remove(worker)
            self._flying.pop(worker, None)
            self._end(*record["tickets"])
        elif event == "exhausted":
            _must(worker in self._live, "has no batch for a worker that is not there")
        elif event == "pin":
            _must(ticket in self._worker, "pins a ticket that is not open")
        elif event in ("resume", "end"):
            _must(record["version"] == self._version, "names a version that is not the newest")
            self.has_ended = event == "end"

    def _land(self, ticket: int) -> None:
        """A ticket in flight arrived or was cancelled: its worker is free."""
        worker = self._worker.get(ticket, -1)
        _must(self._flying.get(worker) == ticket, "is of a ticket that is not under way")
        del self._flying[worker]

    def _end(self, *tickets: int) -> None:
        for ticket in tickets:
            worker = self._worker.pop(ticket, -1)
            _must(worker >= 0 and self._flying.get(worker) != ticket, "ends a ticket that has not arrived")


def _must(condition: bool, fault: str) -> None:
    if not condition:
        raise Unfit(fault)
