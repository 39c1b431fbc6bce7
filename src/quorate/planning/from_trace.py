"""A world from the trace of a run."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from quorate.errors import BadInput
from quorate.planning._filling import fill_in
from quorate.planning.regimes import find_regimes
from quorate.planning.tickets import WITHOUT_ROUNDS, TicketTimes
from quorate.planning.world import CANCEL, FINISH, Floats, World
from quorate.trace import feed, read_lenient

_MOST_ROUNDS = 20_000  # the last ones: enough for any plan, and a long trace is planned as quickly as a short one
_MANY_CUT = 0.1  # of the rounds: where fewer have cancelled work, what is guessed hardly matters
FEWEST_ROUNDS = 20  # below which nothing is recommended
PARTS = ("data", "compute", "transfer")


def world_of_trace(path: Path) -> tuple[World, str]:
    """Everything that a run shows of its workers, with notes on what was left out; and what it did with late work."""
    notes: list[str] = []
    tickets = TicketTimes()
    feed(read_lenient(path, notes.append), tickets)
    header = tickets.header
    source = f"trace {str(path)!r}"
    if header["workers"] < 2:
        raise BadInput(
            f"{source} is of a run with one worker: there is nobody to wait for and nothing to choose; "
            "record a run with two or more"
        )
    table = _by_index(tickets) if header["policy"]["name"] in WITHOUT_ROUNDS else _by_round(tickets)
    (seconds, observed, transfer, span), workers = _without_blanks(table, sorted(set(tickets.worker)), source, notes)
    real = header["engine"]["name"] != "simulated"
    if real and len(seconds) > 10:  # processes that start are slower than ever after
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
    if unknown:
        names = ", ".join(str(workers[column]) for column in unknown)
        some = f"worker{'s' if len(unknown) > 1 else ''} {names}"
        notes.append(
            f"{some} hardly ever finished before the round was over: figures that wait for all are lower bounds; "
            "record with full-sync, or with --late finish, to see them"
        )
    elif (cut := (~np.isnan(seconds) & ~observed).any(axis=1)).mean() > _MANY_CUT:
        seen = int(np.median(observed[cut].sum(axis=1)))
        mostly = "" if cut.all() else f" in {cut.mean():.0%} of its rounds"
        notes.append(
            f"the run waited for {seen} of {len(workers)} arrivals{mostly}: what the others need is guessed from how "
            "late they were when cancelled; a run with full-sync, or with --late finish, would show it"
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
        notes=tuple(notes),
    )
    return world, FINISH if header["policy"].get("late") == FINISH else CANCEL


def too_few(source: str, rounds: int, needed: int | None) -> BadInput:
    """The refusal of a source with too few rounds, with how many it takes."""
    found = f"{source} has {rounds} whole round{'' if rounds == 1 else 's'}, too few to decide"
    if needed is None or needed <= FEWEST_ROUNDS:
        return BadInput(f"{found}; about {FEWEST_ROUNDS} are needed at least: record a longer run")
    return BadInput(
        f"{found}; about {needed:,} are needed for the interval wanted: record a longer run, or ask for a wider "
        f"interval (--interval 0.2) of {FEWEST_ROUNDS} rounds or more"
    )


Table = tuple[Floats, NDArray[np.bool_], Floats | None, Floats]


def _by_round(tickets: TicketTimes) -> Table:
    """One row a round that came to its end: the first ticket of every worker on that version."""
    versions = sorted(version for version in tickets.filled_s if version in tickets.opened_s)[-_MOST_ROUNDS:]
    row_of = {version: row for row, version in enumerate(versions)}
    column_of = {worker: column for column, worker in enumerate(sorted(set(tickets.worker)))}
    shape = len(versions), len(column_of)
    seconds, observed = np.full(shape, np.nan), np.zeros(shape, dtype=np.bool_)
    transfer = np.full(shape, np.nan) if tickets.parts else None
    for place, version in enumerate(tickets.version):
        row, column, took = row_of.get(version), column_of[tickets.worker[place]], tickets.seconds[place]
        if row is None or took is None or not math.isnan(seconds[row, column]):
            continue
        seconds[row, column] = max(took, 1e-9)
        observed[row, column] = tickets.observed[place]
        if transfer is not None and place in tickets.parts:
            transfer[row, column] = tickets.parts[place].transfer_s
    opened = [tickets.opened_s[version] for version in versions]
    ends = [*opened[1:], max(tickets.ended_s, opened[-1])] if opened else []
    return seconds, observed, transfer, np.array(ends) - np.array(opened)


def _by_index(tickets: TicketTimes) -> Table:
    """Workers that never wait for each other have no rounds: a row holds what each began next after the same instant.

    Instants, and not a share of the worker's own tickets, so that what was slow together stays together. What was
    under way at that instant is no fair sample: long tickets are under way more often.
    """
    mine: dict[int, list[int]] = {}
    for place, worker in enumerate(tickets.worker):
        if tickets.seconds[place] is not None:
            mine.setdefault(worker, []).append(place)
    workers = sorted(set(tickets.worker))
    rounds = min(_MOST_ROUNDS, max((len(places) for places in mine.values()), default=0))
    shape = rounds, len(workers)
    seconds, observed = np.full(shape, np.nan), np.zeros(shape, dtype=np.bool_)
    transfer = np.full(shape, np.nan) if tickets.parts else None
    instants = np.arange(rounds) * (tickets.ended_s / max(1, rounds))
    for column, worker in enumerate(workers):
        places = mine.get(worker, [])
        starts = np.array([tickets.started_s[place] for place in places])
        for row, next_one in enumerate(np.searchsorted(starts, instants).tolist()):
            if next_one >= len(places):
                break  # it began nothing more
            place = places[next_one]
            seconds[row, column] = max(tickets.seconds[place] or 0.0, 1e-9)
            observed[row, column] = tickets.observed[place]
            if transfer is not None and place in tickets.parts:
                transfer[row, column] = tickets.parts[place].transfer_s
    return seconds, observed, transfer, np.full(rounds, tickets.ended_s / max(1, rounds))


def _without_blanks(table: Table, workers: list[int], source: str, notes: list[str]) -> tuple[Table, list[int]]:
    """Without workers of which no ticket came to any end, and without rows that nobody is in."""
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
    """What was not seen of communication is what the worker usually needs, or all of them."""
    seen = ~np.isnan(transfer)
    anyone = float(np.median(transfer[seen])) if seen.any() else 0.0
    usual = [
        float(np.median(column[there])) if there.any() else anyone
        for column, there in zip(transfer.T, seen.T, strict=True)
    ]
    return np.minimum(np.where(seen, transfer, usual), seconds)


def _slowest_parts(tickets: TicketTimes) -> dict[int, str] | None:
    """For each worker the part in which it lies furthest behind the middle worker, in seconds."""
    if not tickets.parts:
        return None
    sums: dict[int, list[float]] = {}
    for place, parts in tickets.parts.items():
        total = sums.setdefault(tickets.worker[place], [0.0, 0.0, 0.0, 0.0])
        for part, took in enumerate(parts):
            total[part] += took
        total[3] += 1
    means = {worker: [total / sum_[3] for total in sum_[:3]] for worker, sum_ in sums.items()}
    middle = [median(one[part] for one in means.values()) for part in range(3)]
    return {worker: PARTS[int(np.argmax(np.array(mean) - middle))] for worker, mean in means.items()}
