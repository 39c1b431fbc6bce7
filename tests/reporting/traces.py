"""Small traces whose numbers can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quorate.schema import SCHEMA

HEADER: dict[str, Any] = {
    "event": "run",
    "schema": SCHEMA,
    "quorate": "0.1.0",
    "policy": {"name": "backup", "quorum": 2, "backups": 1, "late": "cancel"},
    "engine": {"name": "simulated", "latency": "constant:1", "network": None, "faults": None},
    "task": "by hand",
    "workers": 3,
    "seed": 7,
    "samples": 1000,
    "batch_size": 10,
    "parameter_bytes": 100,
    "updates": None,
    "epochs": 1,
    "until": None,
}


def join(time: float, worker: int, incarnation: int = 0) -> dict[str, Any]:
    return {"event": "join", "time": time, "worker": worker, "incarnation": incarnation}


def start(time: float, ticket: int, worker: int, version: int) -> dict[str, Any]:
    return {
        **{"event": "start", "time": time, "ticket": ticket, "worker": worker, "incarnation": 0},
        **{"version": version, "batch": ticket, "samples": 10},
    }


def arrive(time: float, ticket: int, compute_s: float) -> dict[str, Any]:
    parts = {"data_s": 0.125, "compute_s": compute_s, "transfer_s": 0.0625}
    return {"event": "arrive", "time": time, "ticket": ticket, **parts}


def apply(time: float, version: int, tickets: list[int], loss: float) -> dict[str, Any]:
    made = {"event": "apply", "time": time, "version": version, "tickets": tickets}
    return {**made, "reason": "quorum reached", "loss": loss, "norm": None}


def cancel(time: float, ticket: int) -> dict[str, Any]:
    return {"event": "cancel", "time": time, "ticket": ticket, "reason": "late: its version is over"}


def measured(time: float, version: int, **measures: float) -> dict[str, Any]:
    return {"event": "evaluate", "time": time, "version": version, "measures": measures}


END: dict[str, Any] = {"event": "end", "time": 8.0, "version": 3, "reason": "data used up", "digest": None}

#: Three rounds of 2+1. Worker 2 is slow in computing; worker 1 is lost at 4.5 and back at the end.
BACKUP: list[dict[str, Any]] = [
    HEADER,
    *(join(0.0, worker) for worker in range(3)),
    *(start(0.0, worker, worker, 0) for worker in range(3)),
    arrive(1.0, 0, 0.8),
    arrive(2.0, 1, 0.8),
    apply(2.0, 1, [0, 1], 4.0),
    measured(2.0, 1, accuracy=0.25),
    cancel(2.0, 2),
    *(start(2.0, 3 + worker, worker, 1) for worker in range(3)),
    arrive(3.0, 5, 2.5),
    arrive(4.0, 3, 0.8),
    apply(4.0, 2, [5, 3], 2.0),
    measured(4.0, 2, accuracy=0.5),
    cancel(4.0, 4),
    *(start(4.0, 6 + worker, worker, 2) for worker in range(3)),
    {"event": "lost", "time": 4.5, "worker": 1, "tickets": [7]},
    arrive(5.0, 6, 0.8),
    arrive(7.0, 8, 2.5),
    apply(7.0, 3, [6, 8], 1.0),
    measured(7.0, 3, accuracy=0.75),
    join(8.0, 1, 1),
    END,
]


def asynchronous(updates: int = 40) -> list[dict[str, Any]]:
    """Two workers, no rounds, no gradients; every gradient but the first is one version old."""
    header = {**HEADER, "policy": {"name": "async", "max_staleness": None}, "task": None, "workers": 2}
    records = [header, join(0.0, 0), join(0.0, 1), start(0.0, 0, 0, 0), start(0.5, 1, 1, 0)]
    for version in range(1, updates + 1):
        time, ticket = 0.5 + 0.5 * version, version - 1
        records.append({"event": "arrive", "time": time, "ticket": ticket})
        records.append({"event": "apply", "time": time, "version": version, "tickets": [ticket], "reason": "arrived"})
        records.append(start(time, ticket + 2, ticket % 2, version))
    time = 0.5 + 0.5 * updates
    over = {"event": "cancel", "time": time, "reason": "the run is over"}
    records += [{**over, "ticket": updates}, {**over, "ticket": updates + 1}]
    return [*records, {**END, "time": time, "version": updates, "reason": "limit reached"}]


def rounds_of(
    *seconds: dict[int, float], updates: int = 10, slow_part: str | None = "compute_s"
) -> list[dict[str, Any]]:
    """Full sync: what each worker's ticket takes in a round, round by round (one is repeated).

    What a ticket takes beyond the second is in `slow_part`, or where that is None in no part.
    """
    rounds = seconds if len(seconds) > 1 else seconds * updates
    workers = sorted(rounds[0])
    records = [
        {**HEADER, "policy": {"name": "full-sync"}, "workers": len(workers)},
        *(join(0.0, one) for one in workers),
    ]
    now = 0.0
    for version, took in enumerate(rounds):
        first = version * len(workers)
        records += [start(now, first + place, worker, version) for place, worker in enumerate(workers)]
        order = sorted(range(len(workers)), key=lambda place: took[workers[place]])
        for place in order:
            parts = {"data_s": 0.0, "compute_s": 1.0, "transfer_s": 0.0}
            if slow_part is not None:
                parts[slow_part] += took[workers[place]] - 1.0
            records.append({"event": "arrive", "time": now + took[workers[place]], "ticket": first + place, **parts})
        now += max(took.values())
        records.append(apply(now, version + 1, [first + place for place in order], 1.0))
    return [*records, {**END, "time": now, "version": len(rounds)}]


def write(folder: Path, records: Iterable[dict[str, Any]]) -> Path:
    """The folder of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trace.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder
