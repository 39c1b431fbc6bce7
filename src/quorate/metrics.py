"""Metrics of a run, computed from its trace alone, in memory that does not grow with the run.

`Metrics` is a recorder: it can watch a run as it goes on or read a trace afterwards, with the same result.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from quorate.events import Parts, Ticket
from quorate.ledger import Ledger
from quorate.policies import POLICIES, RoundPolicy
from quorate.trace import Recorder, Update, feed, own_seconds, read_trace, works_ahead

_VERSION, _SAMPLES = itemgetter(3), itemgetter(5)  # of a ticket
_BINS_PER_E = 1000  # of a histogram: 0.1 % wide
_CURVE_POINTS = 4096
_CHUNK = 1024  # batches


class Histogram:
    """Counts of positive numbers in bins 0.1 % wide: quantiles to 0.05 %, whatever the number of values."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self._bins: dict[int, int] = {}

    def add(self, value: float) -> None:
        key = int(math.log(value) * _BINS_PER_E) if value > 1e-12 else -(10**6)
        self.count += 1  # after the logarithm, which raises for NaN and infinity
        self.total += value
        self._bins[key] = self._bins.get(key, 0) + 1

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, level: float) -> float | None:
        if not self.count:
            return None
        rank, seen = max(1, math.ceil(level * self.count)), 0
        for key in sorted(self._bins):
            seen += self._bins[key]
            if seen >= rank:
                middle = key - 0.5 if key <= 0 else key + 0.5  # int() cuts towards zero
                return 0.0 if key == -(10**6) else math.exp(middle / _BINS_PER_E)
        raise AssertionError("the ranks are within the count")


class Curve:
    """A bounded number of points of a long series: when it is full, every other point is removed."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int, int, float]] = []  # time, version, samples, value
        self._stride = 1
        self._seen = 0

    def add(self, time: float, version: int, samples: int, value: float) -> None:
        if self._seen % self._stride == 0:
            self.points.append((time, version, samples, value))
            if len(self.points) >= _CURVE_POINTS:
                self.points = self.points[::2]
                self._stride *= 2
        self._seen += 1


class Evaluation(NamedTuple):
    """The task's measures of a version."""

    time: float
    version: int
    samples: int
    measures: dict[str, float]


@dataclass(slots=True, eq=False)
class WorkerTotals:
    """Seconds and tickets of one worker."""

    compute_s: float = 0.0  # on all tickets
    wasted_s: float = 0.0  # on tickets that were not applied
    live_s: float = 0.0
    joined_at: float | None = None
    arrived: int = 0
    dropped: int = 0
    lost: int = 0
    unused: int = 0  # tickets that arrived, but were then dropped or lost
    version: int = -1  # that the worker has read; reading it again costs no bytes
    started_at: float = 0.0  # of its ticket in flight

    @property
    def applied(self) -> int:
        """Tickets that made a version or still wait to."""
        return self.arrived - self.unused

    @property
    def idle_s(self) -> float:
        return max(0.0, self.live_s - self.compute_s)


class Metrics(Recorder):
    """Updates, times, staleness, drops, bytes, samples and measures of one run."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self._works_ahead, self._reduced_bytes = False, 0
        self.seconds = 0.0
        self.updates = 0
        self.update_seconds = Histogram()
        self.staleness: dict[int, int] = {}  # of applied tickets
        self.drops: dict[str, int] = {}  # by reason; cancelled and refused tickets included
        self.cancelled_tickets = 0
        self.applied_tickets = self.dropped_tickets = self.lost_tickets = self.refused_tickets = 0
        self.samples_applied = 0
        self.bytes_sent = self.bytes_used = 0
        self.workers: dict[int, WorkerTotals] = {}
        self.loss = Curve()
        self.last_loss: float | None = None
        self.evaluations: list[Evaluation] = []
        self.choices_made = 0  # by a policy that chooses its quorum
        self.last_choice: tuple[int, str] | None = None  # quorum, reason
        self.digest: str | None = None
        self._seconds: dict[int, float] = {}  # arrived ticket, not yet ended -> seconds it took
        self._had_version: set[int] = set()  # open tickets whose worker had read their version before
        self._last_apply = 0.0
        self._arrivals_in_round = 0
        self._kth_sums: list[float] = []
        self._kth_counts: list[int] = []
        self._size = 0  # bytes of a version, and of a gradient
        self._distinct = DistinctSamples(None)

    # ------------------------------------------------------------ events of the run

    def run(self, header: dict[str, Any]) -> None:
        self.header = header
        self._works_ahead = works_ahead(header)
        self._size = header.get("parameter_bytes") or 0
        if self._works_ahead:  # there is no server: one all-reduce an update moves all bytes
            self._size, self._reduced_bytes = 0, 2 * (header["workers"] - 1) * self._size
        self._distinct = DistinctSamples(header)

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        work = self.workers.get(worker)
        if work is None:
            work = self.workers[worker] = WorkerTotals()
        work.joined_at, work.version = time, -1

    def started(self, time: float, ticket: Ticket) -> None:
        work = self.workers[ticket.worker]
        if work.version != ticket.version:
            work.version = ticket.version
            self.bytes_sent += self._size
        else:
            self._had_version.add(ticket.id)
        work.started_at = time

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        work = self.workers[ticket.worker]
        seconds = own_seconds(time - work.started_at, parts, self._works_ahead)
        work.compute_s += seconds
        work.arrived += 1
        self.bytes_sent += self._size
        self._seconds[ticket.id] = seconds
        if ticket.version == self.updates:
            place = self._arrivals_in_round
            if place == len(self._kth_sums):
                self._kth_sums.append(0.0)
                self._kth_counts.append(0)
            self._kth_sums[place] += time - self._last_apply
            self._kth_counts[place] += 1
            self._arrivals_in_round = place + 1

    def chose(self, time: float, version: int, quorum: int, reason: str) -> None:
        self.choices_made += 1
        self.last_choice = quorum, reason

    def applied(self, time: float, update: Update) -> None:
        version, tickets, _, _, loss = update[:5]
        before = version - 1
        staleness, seconds = self.staleness, self._seconds
        if len(tickets) == 1:
            number, _, _, read, _, samples = tickets[0]
            staleness[before - read] = staleness.get(before - read, 0) + 1
            del seconds[number]
        else:  # a round may have ten thousand tickets, so the loops run in C
            samples = sum(map(_SAMPLES, tickets))
            for read, count in Counter(map(_VERSION, tickets)).items():
                staleness[before - read] = staleness.get(before - read, 0) + count
            if len(seconds) == len(tickets):  # no other ticket waits
                seconds.clear()
            else:
                for ticket in tickets:
                    del seconds[ticket[0]]
        self.bytes_sent += self._reduced_bytes
        self.bytes_used += self._reduced_bytes
        used = 2 * len(tickets)  # a version to the worker and a gradient from it
        if self._had_version:
            numbers = {ticket[0] for ticket in tickets}
            used -= len(numbers & self._had_version)
            self._had_version -= numbers
        self.bytes_used += used * self._size
        self.samples_applied += samples
        self.applied_tickets += len(tickets)
        self._distinct.add(tickets, samples)
        self.updates = version
        self.update_seconds.add(time - self._last_apply)
        self._last_apply = self.seconds = time
        self._arrivals_in_round = 0
        if loss is not None:
            self.last_loss = loss
            self.loss.add(time, version, self.samples_applied, loss)

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        self.workers[ticket.worker].unused += 1
        self._count_drop(ticket, self._seconds.pop(ticket.id), reason)

    def refused(self, time: float, ticket: Ticket) -> None:
        seconds = self._seconds.pop(ticket.id, None)
        if seconds is None:
            seconds = self._stopped(time, ticket)
            self.bytes_sent += self._size
        else:  # it had arrived, and NaN or Inf was found only when it was applied
            self.workers[ticket.worker].unused += 1
        self.refused_tickets += 1
        self._count_drop(ticket, seconds, "its gradient held NaN or Inf")

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        self.cancelled_tickets += 1
        self._count_drop(ticket, self._stopped(time, ticket), reason)

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        work = self.workers[worker]
        work.live_s += time - (work.joined_at or 0.0)
        work.joined_at = None
        for ticket in tickets:
            seconds = self._seconds.pop(ticket.id, None)
            work.wasted_s += self._stopped(time, ticket) if seconds is None else seconds
            work.unused += seconds is not None
            work.lost += 1
            self.lost_tickets += 1
            self._had_version.discard(ticket.id)

    def _stopped(self, time: float, ticket: Ticket) -> float:
        """A ticket in flight ended; returns the seconds that its worker spent on it."""
        work = self.workers[ticket.worker]
        seconds = time - work.started_at
        work.compute_s += seconds
        return seconds

    def _count_drop(self, ticket: Ticket, seconds: float, reason: str) -> None:
        work = self.workers[ticket.worker]
        work.wasted_s += seconds
        work.dropped += 1
        self.dropped_tickets += 1
        self.drops[reason] = self.drops.get(reason, 0) + 1
        self._had_version.discard(ticket.id)

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        self.evaluations.append(Evaluation(time, version, self.samples_applied, measures))

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        self.seconds = time
        self.digest = digest
        for work in self.workers.values():
            if work.joined_at is not None:
                work.live_s += time - work.joined_at
                work.joined_at = None

    # ------------------------------------------------------------ results

    def kth_arrival_means(self) -> list[float]:
        """Mean seconds from a version to its k-th arrival, k = 1, 2, …"""
        return [total / count for total, count in zip(self._kth_sums, self._kth_counts, strict=True)]

    def time_to(self, name: str, target: float) -> float | None:
        """When a measure first reached a target; None if it never did."""
        for evaluation in self.evaluations:
            if evaluation.measures.get(name, -math.inf) >= target:
                return evaluation.time
        return None

    def drop_rate(self) -> float:
        """Share of ended tickets that were dropped."""
        return self.dropped_tickets / max(1, self.dropped_tickets + self.applied_tickets + self.lost_tickets)

    def staleness_mean(self) -> float:
        count = sum(self.staleness.values())
        return sum(behind * times for behind, times in self.staleness.items()) / count if count else 0.0

    def _last_measures(self) -> dict[str, float | None]:
        """The last evaluation for JSON: NaN and Inf become null."""
        measures = self.evaluations[-1].measures if self.evaluations else {}
        return {name: value if math.isfinite(value) else None for name, value in measures.items()}

    def summary(self) -> dict[str, Any]:
        """The numbers of `--json`."""
        times = self.update_seconds
        work = self.workers.values()
        return {
            "policy": self.header.get("policy"),
            "workers": self.header.get("workers"),
            "updates": self.updates,
            "seconds": self.seconds,
            "update_seconds": {"mean": times.mean, "median": times.quantile(0.5), "p99": times.quantile(0.99)},
            "tickets": {
                "applied": self.applied_tickets,
                "dropped": self.dropped_tickets,
                "lost": self.lost_tickets,
                "cancelled": self.cancelled_tickets,
                "refused": self.refused_tickets,
                "reasons": dict(sorted(self.drops.items())),
            },
            "samples": {"applied": self.samples_applied, "distinct": self._distinct.count()},
            "staleness": {"mean": self.staleness_mean(), "max": max(self.staleness, default=0)},
            "bytes": {"sent": self.bytes_sent, "used": self.bytes_used, "wasted": self.bytes_sent - self.bytes_used},
            "worker_seconds": {
                "compute": sum(one.compute_s for one in work),
                "wasted": sum(one.wasted_s for one in work),
                "idle": sum(one.idle_s for one in work),
            },
            "choices": None if self.last_choice is None else {"made": self.choices_made, "last": self.last_choice[1]},
            "loss": self.last_loss,
            "evaluation": self._last_measures(),
            "digest": self.digest,
        }


class DistinctSamples:
    """Counts distinct samples applied, from the batches applied and the header's description of the data."""

    def __init__(self, header: dict[str, Any] | None) -> None:
        self._endless = 0  # samples of a stream, which are all distinct
        self._used: dict[int, bytearray] = {}  # in chunks, so that memory grows with the batches used, not with all
        self._by_epoch: dict[int, list[int]] = {}  # epoch -> distinct batches, samples in them
        self._ledger: Ledger | None = None
        self._whole = False  # all batches of an epoch were applied, hence every sample
        if header is not None and header.get("samples") is not None:
            self._ledger = Ledger(header["samples"], header["batch_size"], seed=header["seed"])

    def add(self, tickets: tuple[Ticket, ...], samples: int) -> None:
        if self._ledger is None:
            self._endless += samples
            return
        if self._whole:
            return
        per_epoch = self._ledger.batches_per_epoch
        assert per_epoch is not None
        for ticket in tickets:
            batch = ticket[4]
            chunk = self._used.get(batch // _CHUNK)
            if chunk is None:
                chunk = self._used[batch // _CHUNK] = bytearray(_CHUNK)
            if chunk[batch % _CHUNK]:
                continue
            chunk[batch % _CHUNK] = 1
            counts = self._by_epoch.setdefault(batch // per_epoch, [0, 0])
            counts[0] += 1
            counts[1] += self._ledger.size(batch)
            self._whole = self._whole or counts[0] == per_epoch

    def count(self) -> int:
        if self._ledger is None:
            return self._endless
        assert self._ledger.samples is not None
        if self._whole:
            return self._ledger.samples
        if len(self._by_epoch) < 2:
            return sum(samples for _, samples in self._by_epoch.values())
        seen: set[int] = set()
        for number, chunk in sorted(self._used.items()):
            for place, is_used in enumerate(chunk):
                if is_used:
                    seen.update(self._ledger.indices(number * _CHUNK + place))
        return len(seen)


class KthArrivals(Recorder):
    """Every round's arrival times, for distributions: `times[k-1]` lists the seconds to the k-th arrival."""

    def __init__(self) -> None:
        self.times: list[list[float]] = []
        self._version = 0
        self._opened_at = 0.0
        self._place = 0

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        if ticket.version != self._version:
            return
        if self._place == len(self.times):
            self.times.append([])
        self.times[self._place].append(time - self._opened_at)
        self._place += 1

    def applied(self, time: float, update: Update) -> None:
        self._version, self._opened_at, self._place = update.version, time, 0


def metrics_of(path: Path) -> Metrics:
    """The metrics of a recorded run."""
    metrics = Metrics()
    feed(read_trace(path), metrics)
    return metrics


def recorded_rounds(header: dict[str, Any]) -> bool:
    """Whether the workers of a recorded run started together on each version."""
    rounds: bool = header.get("rounds", POLICIES.get(header["policy"]["name"], RoundPolicy).has_rounds)
    return rounds


def round_quorum(header: dict[str, Any]) -> int | None:
    """The quorum of a recorded run's rounds; None without rounds, where `quorum` counts arrivals of any version."""
    quorum = header["policy"].get("quorum")
    return quorum if type(quorum) is int and quorum > 0 and recorded_rounds(header) else None
