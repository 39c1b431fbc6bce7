"""The same clusters in the simulator, without gradients: what waiting for stragglers and for links come to together."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import NamedTuple

import quorate
from benchmarks.scaling.links import FP32_BYTES, queued_s
from benchmarks.scaling.paper import BACKUPS, LATENCY_S, MACHINES, RATES_GBIT, SIZES, load, rate, seconds_text, table
from quorate.events import Parts, Ticket
from quorate.network import Network
from quorate.trace import Update

LATENCY = "chen2016"
UPDATES = {100: 400, 1000: 100}


class Run(NamedTuple):
    """One run of the simulator beside the formula."""

    simulated_s: float  # an update
    paper_s: float

    @property
    def ratio(self) -> float:
        return self.simulated_s / self.paper_s


def policy(machines: int, backups: int, late: str = "cancel") -> quorate.Policy:
    return quorate.BackupSync(machines - backups, backups, late=late) if backups else quorate.FullSync()


@cache
def compute_s(machines: int, backups: int, updates: int) -> float:
    """Mean time of an update where communication is free: in the same rounds, since seeds are the same."""
    engine = quorate.Simulated(machines, LATENCY)
    return float(quorate.train(None, policy(machines, backups), engine, updates=updates).summary["seconds"] / updates)


def simulate(
    parameters: int, machines: int, gbit: float, shards: int, backups: int, updates: int, *recorders: quorate.Recorder
) -> float:
    """Seconds of an update."""
    link = rate(gbit)
    network = Network(bandwidth=link.bytes_per_s, server_bandwidth=link.bytes_per_s, latency_s=LATENCY_S, shards=shards)
    engine = quorate.Simulated(machines, LATENCY, network=network, model_bytes=FP32_BYTES * parameters)
    result = quorate.train(None, policy(machines, backups), engine, updates=updates, recorders=recorders)
    return float(result.summary["seconds"] / updates)


def run(parameters: int, machines: int, gbit: float, shards: int, backups: int, updates: int | None = None) -> Run:
    updates = updates or UPDATES[machines]
    seconds = simulate(parameters, machines, gbit, shards, backups, updates)
    compute = compute_s(machines, backups, updates)
    return Run(seconds, queued_s(load(parameters, machines, backups), rate(gbit), shards, compute))


def cell(one: Run) -> str:
    return f"{seconds_text(one.simulated_s)} ({one.ratio:.2f})"


def row(name: str, machines: int, gbit: int) -> list[str]:
    """Full sync and with backups, at each number of shards."""
    runs = [
        run(SIZES[name], machines, gbit, shards, backups)
        for shards in (1, machines // 10, machines)
        for backups in (0, BACKUPS[machines])
    ]
    return [name, f"{machines:,}", str(gbit), *map(cell, runs)]


def seconds_of_updates() -> str:
    """Simulated seconds of an update, and their ratio to the formula."""
    head = ["parameters", "machines", "Gbit/s"]
    head += [f"{shards}, {kind}" for shards in ("S = 1", "S = n/10", "S = n") for kind in ("all n", "backups")]
    return table(head, [row(name, machines, gbit) for name in SIZES for machines in MACHINES for gbit in RATES_GBIT])


# ------------------------------------------------------------ who is late, and what is alive


class _Late(quorate.Recorder):
    """Who is late, and how many versions are in use when one is made: the new one, and those that are still read."""

    def __init__(self) -> None:
        self._reads: dict[int, int] = {}  # open ticket -> its version
        self.late: Counter[int] = Counter()  # by worker
        self.alive: list[int] = []

    def started(self, time: float, ticket: Ticket) -> None:
        self._reads[ticket.id] = ticket.version

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        del self._reads[ticket.id]

    def applied(self, time: float, update: Update) -> None:
        self.alive.append(1 + len(set(self._reads.values())))

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        self.late[ticket.worker] += 1

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        del self._reads[ticket.id]
        self.late[ticket.worker] += 1


def late_by_place(machines: int, parameters: int, gbit: float, shards: int) -> float:
    """Share of the late gradients that are of the b workers who were sent the version last."""
    watch, backups = _Late(), BACKUPS[machines]
    simulate(parameters, machines, gbit, shards, backups, UPDATES[machines], watch)
    return sum(watch.late[worker] for worker in range(machines - backups, machines)) / watch.late.total()


def places() -> str:
    """Whom backups leave out: the slow ones, or whoever stands last in the server's queue."""
    rows = []
    for name, gbit in (("25M", 100), ("25M", 10), ("350M", 10)):
        shares = [f"{late_by_place(100, SIZES[name], gbit, shards):.0%}" for shards in (1, 10, 100)]
        rows.append([name, "100", str(gbit), *shares])
    return table(["parameters", "machines", "Gbit/s", "S = 1", "S = 10", "S = 100"], rows)


def versions_alive() -> str:
    """How many versions are in use where late work is left to finish."""
    rows = []
    for machines in MACHINES:
        backups, watch = BACKUPS[machines], _Late()
        engine = quorate.Simulated(machines, LATENCY)
        updates = 10 * UPDATES[machines]
        quorate.train(None, policy(machines, backups, "finish"), engine, updates=updates, recorders=(watch,))
        cells = [f"{machines - backups}+{backups}", f"{sum(watch.alive) / updates:.1f}", str(max(watch.alive))]
        rows.append([*cells, str(backups + 1)])
    return table(["workers", "mean", "most", "bound, b + 1"], rows)
