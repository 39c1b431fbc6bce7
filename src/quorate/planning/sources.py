"""Worlds from their three sources: the trace of a run, CSV files of step times, or a latency model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quorate.errors import BadInput
from quorate.events import Parts, Ticket
from quorate.latency import Latency
from quorate.latency.step_times import CORE_WAIT, CORES, PHASES, WAITING, StepTimes, read_step_times
from quorate.metrics import recorded_rounds, round_quorum
from quorate.number_format import number, percent
from quorate.number_format import seconds as seconds_text
from quorate.planning.censoring import fill_in, find_regimes
from quorate.planning.world import CANCEL, FINISH, Floats, World
from quorate.policies import POLICIES
from quorate.trace import Recorder, Update, feed, own_seconds, read_lenient, works_ahead


class TicketTimes(Recorder):
    """Times of all tickets in a trace: lists with one entry per ticket, and dictionaries by version."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {}
        self.worker: list[int] = []
        self.version: list[int] = []
        self.started_s: list[float] = []
        self.seconds: list[float | None] = []  # None: lost, or still running
        self.observed: list[bool] = []  # False: cancelled, so it would have taken longer
        self.parts: dict[int, Parts] = {}  # index in these lists -> seconds by part
        self.opened_s: dict[int, float] = {}  # version -> start of its first ticket
        self.filled_s: dict[int, float] = {}  # version -> arrival of the last gradient of its round
        self.ended_s = 0.0
        self.busy_s = 0.0  # of all tickets, since the run was last resumed
        self.core_wait_s: float | None = None  # seconds that workers waited for a core
        self.noise_scales: list[float] = []  # in time order
        self._place: dict[int, int] = {}  # open ticket -> its index in the lists

    @property
    def workers(self) -> list[int]:
        return sorted(set(self.worker))

    def listening(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Pass the records on, and keep the core wait of the last one, which recorders do not receive."""
        for record in records:
            if record["event"] == "end":
                self.core_wait_s = record.get("core_wait_s")
            yield record

    def run(self, header: dict[str, Any]) -> None:
        self.header = header

    def started(self, time: float, ticket: Ticket) -> None:
        self._place[ticket.id] = len(self.worker)
        self.worker.append(ticket.worker)
        self.version.append(ticket.version)
        self.started_s.append(time)
        self.seconds.append(None)
        self.observed.append(False)
        self.opened_s.setdefault(ticket.version, time)

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        place = self._ends(time, ticket, observed=True)
        if parts is not None:
            self.parts[place] = parts
            self.seconds[place] = own_seconds(self.seconds[place] or 0.0, parts, works_ahead(self.header))

    def refused(self, time: float, ticket: Ticket) -> None:
        if not self.observed[self._place[ticket.id]]:
            self._ends(time, ticket, observed=True)

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        self._ends(time, ticket, observed=False)

    def applied(self, time: float, update: Update) -> None:
        self.ended_s = time
        if update.tickets:
            places = [self._place.pop(ticket.id) for ticket in update.tickets]
            self.filled_s[update.version - 1] = max(self.started_s[p] + (self.seconds[p] or 0.0) for p in places)
        if update.noise_scale is not None:
            self.noise_scales.append(update.noise_scale)

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        self.busy_s = 0.0

    def _ends(self, time: float, ticket: Ticket, observed: bool) -> int:
        place = self._place[ticket.id]
        self.seconds[place] = time - self.started_s[place]
        self.busy_s += time - self.started_s[place]
        self.observed[place] = observed
        return place


_MOST_ROUNDS = 20_000  # of a long trace only the last rounds are used, to bound planning time
_MANY_CUT = 0.1  # share of rounds with cancelled work above which estimates of cancelled work are reported
LONG_CORE_WAIT = 0.25  # share of the workers' time above which their times show the machine, not the workers
FEWEST_ROUNDS = 20  # fewer rounds give no recommendation
PARTS = ("data", "compute", "transfer")


def world_of_trace(path: Path) -> tuple[World, str]:
    """The world of a recorded run, and how the run handled late work."""
    notes: list[str] = []
    tickets = TicketTimes()
    feed(tickets.listening(read_lenient(path, notes.append)), tickets)
    header = tickets.header
    source = f"trace {str(path)!r}"
    if header["workers"] < 2:
        raise BadInput(
            f"{source} is of a run with one worker: there is nobody to wait for and nothing to choose; "
            "record a run with two or more"
        )
    has_rounds = recorded_rounds(header)
    table = _by_round(tickets) if has_rounds else _by_index(tickets)
    (seconds, observed, transfer, span), workers = _without_blanks(table, tickets.workers, source, notes)
    real = header["engine"]["name"] != "simulated"
    if real and len(seconds) > 10:  # the first round includes the start of the processes
        seconds, observed, span = seconds[1:], observed[1:], span[1:]
        transfer = None if transfer is None else transfer[1:]
    if not len(seconds):
        raise too_few(source, 0, None)
    regimes = find_regimes(seconds)
    full, unknown = fill_in(seconds, observed, regimes, np.random.default_rng(0))
    if len(unknown) == len(workers):
        raise BadInput(
            f"{source}: no worker finished often enough before its round was over to say how long it takes; "
            "record a longer run, or one that waits for more arrivals (full-sync shows them all)"
        )
    cut = ~np.isnan(seconds) & ~observed
    guessed = bool(cut.any(axis=1).mean() > _MANY_CUT)
    cautions, shares_cores = _core_cautions(tickets)
    if unknown:
        names = ", ".join(str(workers[column]) for column in unknown)
        some = f"worker{'s' if len(unknown) > 1 else ''} {names}"
        cautions.append(
            f"{some} hardly ever finished before the round was over and late work was cancelled: figures that wait for "
            "all are lower bounds; record with full-sync, or with --late finish, to see them"
        )
    elif guessed:
        rows = cut.any(axis=1)
        seen = int(np.median(observed[rows].sum(axis=1)))
        mostly = "" if rows.all() else f" in {rows.mean():.0%} of its rounds"
        cautions.append(
            f"the run waited for {seen} of {len(workers)} arrivals{mostly} and cancelled the others, so how long those "
            f"take is a guess from how late they were: figures of a split that waits for more than {seen}, and every "
            f"factor against {len(workers)}+0, rest on it; record with full-sync, or with --late finish, to see them"
        )
    overhead = [
        tickets.opened_s[version + 1] - filled
        for version, filled in tickets.filled_s.items()
        if version + 1 in tickets.opened_s
    ]
    samples, batch = header.get("samples"), header.get("batch_size")
    world = World(
        source=source,
        seconds=full,
        span_s=span,
        regimes=regimes,
        workers=tuple(workers),
        unseen=frozenset(workers[column] for column in unknown),
        overhead_s=max(0.0, float(np.mean(overhead))) if overhead and real else 0.0,
        transfer_s=None if transfer is None else _filled_transfers(transfer, full),
        batch_size=batch,
        batches_per_epoch=math.ceil(samples / batch) if samples else None,
        model_bytes=header.get("parameter_bytes") or None,
        noise_scale=median(tickets.noise_scales) if tickets.noise_scales else None,
        slowest_part=_slowest_parts(tickets),
        kept_quorum=_quorum_run(header, len(workers)) if shares_cores else None,
        least_all_s=float(np.where(cut, seconds, full).max(axis=1).mean()) if guessed else None,
        cautions=tuple(cautions),
        notes=tuple(notes),
    )
    return world, FINISH if header["policy"].get("late") == FINISH else CANCEL


def _core_cautions(tickets: TicketTimes) -> tuple[list[str], bool]:
    """Warnings if workers waited for a core, and whether they had to share cores."""
    found = tickets.header.get("machine")
    if found is None:
        return [], False
    cores, workers = found["cores"], found["workers"]
    wait = None if tickets.core_wait_s is None else tickets.core_wait_s / max(tickets.busy_s, 1e-9)
    if wait is None and (tickets.header["engine"]["name"] != "local" or tickets.header["engine"].get("latency")):
        return [], False  # the workers may have slept most of the time
    if wait is not None and wait < LONG_CORE_WAIT:
        return [], False
    share = "" if wait is None else f" {min(wait, 1.0):.0%} of their time"
    if workers <= cores:
        if wait is None:
            return [], False
        return [
            f"the workers waited for a core{share}, though there were enough for {workers}: other programs kept the "
            "machine busy, and their load is in every figure; record again on a machine with nothing else to do"
        ], False
    return [
        f"{workers} workers shared {cores} core{'s' if cores > 1 else ''} and waited for one{share}. Their times show "
        f"how the machine divides its cores, not how workers differ, so no other split can be predicted. On this "
        f"machine try as many workers as cores (--workers {cores}); to plan for machines of their own, record there"
    ], True


def _quorum_run(header: dict[str, Any], workers: int) -> int:
    """The gradients of an update, if it takes at most one of each worker; otherwise the number of workers."""
    kind, quorum = POLICIES.get(header["policy"]["name"]), round_quorum(header)
    return workers if quorum is None or not (kind is None or kind.collective) else min(quorum, workers)


def too_few(source: str, rounds: int, needed: int | None) -> BadInput:
    """The error for a source with too few rounds; it says how many are needed."""
    found = f"{source} has {rounds} whole round{'' if rounds == 1 else 's'}, too few to decide"
    if needed is None or needed <= FEWEST_ROUNDS:
        return BadInput(f"{found}; about {FEWEST_ROUNDS} are needed at least: record a longer run")
    return BadInput(
        f"{found}; about {needed:,} are needed for the interval wanted: record a longer run, or ask for a wider "
        f"interval (--interval 0.2) of {FEWEST_ROUNDS} rounds or more"
    )


Table = tuple[Floats, NDArray[np.bool_], Floats | None, Floats]


def _by_round(tickets: TicketTimes) -> Table:
    """One row per finished round: the first ticket of every worker on that version."""
    versions = sorted(version for version in tickets.filled_s if version in tickets.opened_s)[-_MOST_ROUNDS:]
    row_of = {version: row for row, version in enumerate(versions)}
    column_of = {worker: column for column, worker in enumerate(tickets.workers)}
    cells: dict[tuple[int, int], int] = {}
    for place, version in enumerate(tickets.version):
        if version in row_of and tickets.seconds[place] is not None:
            cells.setdefault((row_of[version], column_of[tickets.worker[place]]), place)
    opened = [tickets.opened_s[version] for version in versions]
    ends = [*opened[1:], max(tickets.ended_s, opened[-1])] if opened else []
    return _table(tickets, cells, np.array(ends) - np.array(opened))


def _by_index(tickets: TicketTimes) -> Table:
    """One row per instant, for runs without rounds: the next ticket that each worker started after that instant.

    Common instants keep times together that were slow together; the n-th ticket of each worker would not. A ticket
    that is already running at the instant is a biased sample, since long tickets run more often.
    """
    mine: dict[int, list[int]] = {}
    for place, worker in enumerate(tickets.worker):
        if tickets.seconds[place] is not None:
            mine.setdefault(worker, []).append(place)
    rounds = min(_MOST_ROUNDS, max((len(places) for places in mine.values()), default=0))
    span_s = tickets.ended_s / max(1, rounds)
    cells: dict[tuple[int, int], int] = {}
    for column, worker in enumerate(tickets.workers):
        places = mine.get(worker, [])
        starts = np.array([tickets.started_s[place] for place in places])
        for row, next_one in enumerate(np.searchsorted(starts, np.arange(rounds) * span_s).tolist()):
            if next_one < len(places):
                cells[row, column] = places[next_one]
    return _table(tickets, cells, np.full(rounds, span_s))


def _table(tickets: TicketTimes, cells: dict[tuple[int, int], int], span_s: Floats) -> Table:
    """cells: (row, column) -> index of the ticket in the lists."""
    shape = len(span_s), len(tickets.workers)
    seconds, observed = np.full(shape, np.nan), np.zeros(shape, dtype=np.bool_)
    transfer = np.full(shape, np.nan) if tickets.parts else None
    for cell, place in cells.items():
        seconds[cell] = max(tickets.seconds[place] or 0.0, 1e-9)
        observed[cell] = tickets.observed[place]
        if transfer is not None and place in tickets.parts:
            transfer[cell] = tickets.parts[place].transfer_s
    return seconds, observed, transfer, span_s


def _without_blanks(table: Table, workers: list[int], source: str, notes: list[str]) -> tuple[Table, list[int]]:
    """Drop the workers without any finished or cancelled ticket, and the rows without any worker."""
    seconds, observed, transfer, span = table
    there = ~np.isnan(seconds)
    rows = [bool(row.any()) for row in there]
    columns = [bool(column.any()) or not any(rows) for column in there.T]
    if sum(columns) < 2:
        raise BadInput(f"{source}: fewer than two workers ever finished a ticket; record a run in which they live")
    if not all(columns):
        gone = [str(worker) for worker, is_there in zip(workers, columns, strict=True) if not is_there]
        notes.append(f"worker{'s' if len(gone) > 1 else ''} {', '.join(gone)} never finished a ticket: left out")
    kept = np.ix_(rows, columns)
    table = seconds[kept], observed[kept], None if transfer is None else transfer[kept], span[rows]
    return table, [worker for worker, is_there in zip(workers, columns, strict=True) if is_there]


def _filled_transfers(transfer: Floats, seconds: Floats) -> Floats:
    """Fill in unseen communication times: with the median of the worker, else with the median of all workers."""
    seen = ~np.isnan(transfer)
    anyone = float(np.median(transfer[seen])) if seen.any() else 0.0
    usual = [
        float(np.median(column[there])) if there.any() else anyone
        for column, there in zip(transfer.T, seen.T, strict=True)
    ]
    return np.minimum(np.where(seen, transfer, usual), seconds)


def _slowest_parts(tickets: TicketTimes) -> dict[int, str] | None:
    """`slowest_parts` from the tickets; None if the trace has no parts."""
    if not tickets.parts:
        return None
    by_worker: dict[int, list[Parts]] = {}
    for place, parts in tickets.parts.items():
        by_worker.setdefault(tickets.worker[place], []).append(parts)
    means = {worker: np.mean(parts, axis=0).tolist() for worker, parts in by_worker.items()}
    return slowest_parts(means, PARTS)


def slowest_parts(means: dict[int, list[float]], names: Sequence[str]) -> dict[int, str]:
    """For each worker the part in which it is furthest behind the median, from its mean seconds in each part."""
    middle = [median(parts) for parts in zip(*means.values(), strict=True)]
    return {worker: names[int(np.argmax(np.array(mean) - middle))] for worker, mean in means.items()}


def world_of_csv(paths: Sequence[Path]) -> World:
    """The world of measured step times. Every step is a round, since the workers of a DDP script wait for all."""
    found = read_step_times(paths)
    workers = found.workers
    column_of = {worker: column for column, worker in enumerate(workers)}
    seconds = np.full((len(found.times), len(workers)), np.nan)
    for row, step in enumerate(sorted(found.times)):
        for worker, took in found.times[step].items():
            seconds[row, column_of[worker]] = took
    regimes = find_regimes(seconds)
    seconds, _ = fill_in(seconds, ~np.isnan(seconds), regimes, np.random.default_rng(0))
    cautions, shares_cores = _cautions_of_table(found)
    # The last worker of a step waits for no other worker: its waiting time is the all-reduce.
    least = [min(row.values()) for row in found.more.get(WAITING, {}).values()]
    overhead_s = fmean(least) if least else 0.0
    notes = list(found.notes)
    if least:
        notes.append(f"the all-reduce, {seconds_text(overhead_s)} a step, is in every figure")
    else:
        cautions.append(
            "the all-reduce is not in the table (column waiting), so an update takes longer than the figures say, and "
            "gains are shown larger than they are; quorate.measure writes that column"
        )
    means = {phase: found.means(phase) for phase in PHASES}
    timed = [worker for worker in workers if all(worker in by_worker for by_worker in means.values())]
    phases = {worker: [means[phase][worker] for phase in PHASES] for worker in timed}
    return World(
        source=f"step times {', '.join(repr(str(path)) for path in paths)}",
        seconds=seconds,
        span_s=seconds.max(axis=1) + overhead_s,
        regimes=regimes,
        workers=tuple(workers),
        overhead_s=overhead_s,
        slowest_part=slowest_parts(phases, PHASES) if phases else None,
        kept_quorum=len(workers) if shares_cores else None,
        cautions=tuple(cautions),
        notes=tuple(notes),
    )


def _cautions_of_table(found: StepTimes) -> tuple[list[str], bool]:
    """Warnings if processes waited for a core, and whether they had to share cores."""
    waits, cores = found.means(CORE_WAIT).values(), found.means(CORES).values()
    wait = fmean(waits) if waits else 0.0
    if wait < LONG_CORE_WAIT:
        return [], False
    if not cores or min(cores) >= 1:
        return [
            f"the processes waited for a core {percent(wait)} of their time, though there were enough: other programs "
            "kept the machine busy, and their load is in every figure; measure again with nothing else to do"
        ], False
    return [
        f"{number(1 / min(cores))} processes shared each core and waited for it {percent(wait)} of their time. Their "
        "times show how the machine divides its cores, not how workers differ, so no other split can be predicted; "
        "measure with a core for each process, or on machines of their own"
    ], True


_MOST_DRAWS = 300_000
_MOST_DRAWN_ROUNDS, _FEWEST_ROUNDS = 10_000, 1_000


def world_of_latency(latency: Latency, machines: int, seed: int = 0) -> World:
    """Rounds drawn from a latency model.

    A round starts when the slowest worker of the one before has finished, because slow spells depend on the clock.
    """
    draw = latency.sampler(seed, machines)
    rounds = max(_FEWEST_ROUNDS, min(_MOST_DRAWN_ROUNDS, _MOST_DRAWS // machines))
    seconds = np.empty((rounds, machines))
    span = np.empty(rounds)
    time_s = 0.0
    for row in range(rounds):
        times = [draw(worker, row, row, time_s) for worker in range(machines)]
        seconds[row] = times
        span[row] = max(times)
        time_s += max(times)
    return World(
        source=f"latency {latency.text()}",
        seconds=seconds,
        span_s=span,
        regimes=find_regimes(seconds),
        workers=tuple(range(machines)),
    )
