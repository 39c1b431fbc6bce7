"""The study's tables, for its summary and for the pages. What was not run is a dash."""

from __future__ import annotations

import math

from experiments.common.curves import Point
from experiments.common.spread import Spread, markdown
from experiments.common.trials import Found
from experiments.inception import results
from experiments.inception.results import Curves
from experiments.inception.settings import (
    ASYNC,
    AVERAGE_EPOCHS,
    EARLY_QUORUMS,
    FULL,
    FULL_RATES,
    GRID_BACKUPS,
    SYNC,
    Length,
    Trial,
)
from experiments.inception.timing import Seconds, Split
from experiments.published import CHEN, shown

#: Accuracies to which updates are counted: of the grid, of the initial rates, and of the first epochs.
TARGETS = (0.5, 0.6, 0.65, 0.7)
RATE_TARGETS = (0.4, 0.6)
EARLY_TARGETS = (0.25, 0.3, 0.35, 0.4, 0.5)
#: What a table has where there is nothing, and where a target is not reached.
NONE, NEVER = "–", "not in all seeds"


def summary(found: Found[Trial, Point], rounds: Found[Split, Seconds], length: Length) -> str:
    """All of them."""
    made = [
        pairs(found, length),
        seconds(found, length),
        full_rates(found, length),
        clipped(found, length),
        long(found, length),
        initial_rates(found, length),
        first_epoch(found, length),
        early(found),
        updates(found, length),
        splits(found, rounds, length),
    ]
    return "\n".join(made)


# ---------------------------------------------------------------- sync beside async


def _names() -> list[tuple[str, str]]:
    return [(f"sync {n}+{b}", f"async {workers}") for (n, b), workers in zip(SYNC, ASYNC, strict=True)]


def pairs(found: Found[Trial, Point], length: Length = FULL) -> str:
    """Sync beside async on as many machines: where both end, and who is first where both get to."""
    finals, chosen = results.finals(found, length), results.rates(found, length)
    rows = []
    for (n, b), names in zip(SYNC, _names(), strict=True):
        one, other = (finals.get(name, []) for name in names)
        if not one or not other:
            continue
        target = results.common_target(one, other)
        times = [results.hours_to(curves, target) for curves in (one, other)]
        rows.append(
            (
                f"{n}+{b} and {n + b}",
                f"{chosen[names[0]]:g} and {chosen[names[1]]:g}",
                f"**{accuracy(one)}**",
                accuracy(other),
                results.more(one, other).text(1, 100),
                *(f"{results.hours(curves).mean:.3f}" for curves in (one, other)),
                f"{100 * target:.1f} %",
                *(NEVER if spread is None else spread.text(3) for spread in times),
                f"{results.times_as_soon(one, other):.1f}" if None not in times else NONE,
            )
        )
    head = ["machines", "rates", "sync, %", "async, %", "points more", "sync, hours", "async, hours"]
    return markdown([*head, "common target", "sync there after", "async there after", "times as soon"], rows)


def accuracy(curves: Curves) -> str:
    return results.accuracy(curves).text(2, 100) if curves else NONE


def seconds(found: Found[Trial, Point], length: Length = FULL) -> str:
    """Seconds a round of the six configurations, a round of async being a gradient of every worker."""
    finals = results.finals(found, length)
    rows = []
    for both in zip(*_names(), strict=True):
        for name in both:
            theirs, curves = CHEN["fig8"][name]["seconds_a_round_digitised"], finals.get(name)
            ours = (
                results.seconds_of_training(curves, int(name.split()[1]) if "async" in name else 1) if curves else None
            )
            rows.append(
                (name, shown(theirs, 2), ours.text(2) if ours else NONE, f"{ours.mean / theirs:.2f}" if ours else NONE)
            )
    return markdown(("workers", "published, s", "ours, s", "ours / published"), rows)


def full_rates(found: Found[Trial, Point], length: Length = FULL) -> str:
    """Async at several rates in full length."""
    by_rate = {workers: results.by_rate(found, f"async {workers}", length) for workers in FULL_RATES}
    rates = sorted(
        {rate for one in by_rate.values() for rate in one} | {rate for one in FULL_RATES.values() for rate in one}
    )
    rows = []
    for workers, one in by_rate.items():
        best = results.rates(found, length).get(f"async {workers}")
        cells = [accuracy(one[rate]) + _partly(one[rate], length) if rate in one else NONE for rate in rates]
        rows.append(
            (workers, *(f"**{cell}**" if rate == best else cell for rate, cell in zip(rates, cells, strict=True)))
        )
    return markdown(("async, %", *(f"rate {rate:g}" for rate in rates)), rows)


def _partly(curves: Curves, length: Length) -> str:
    """Where not all seeds are there."""
    missing = len(length.seeds) - len(curves)
    return f" ({len(curves)} of {len(length.seeds)} seeds)" if missing else ""


def clipped(found: Found[Trial, Point], length: Length = FULL) -> str:
    made = results.clipped(found, length)
    cells = [accuracy(curves) + _partly(curves, length) for curves in made.values()]
    return markdown(("async 212, clipped to a norm of", *(f"{clip:g}" for clip in made)), [("accuracy, %", *cells)])


def long(found: Found[Trial, Point], length: Length = FULL) -> str:
    """Twice as many epochs, for the smallest number of workers."""
    finals = results.finals(found, length)
    rows = []
    for name in _names()[0]:
        trainings = ((length.epochs, finals.get(name, [])), (length.long_epochs, results.long(found, name, length)))
        for epochs, curves in trainings:
            hours = results.hours(curves).text(3) if curves else NONE
            rows.append((name, epochs, accuracy(curves), hours, len(curves)))
    return markdown(("workers", "epochs", "accuracy, %", "hours", "seeds"), rows)


# ---------------------------------------------------------------- initial rates


def initial_rates(found: Found[Trial, Point], length: Length = FULL) -> str:
    """The paper's second table: the initial rate of 100+6."""
    by_rate = results.by_rate(found, "sync 100+6", length)
    rows = [
        ("accuracy, %", *map(accuracy, by_rate.values())),
        *(
            (f"updates to {100 * target:g} %", *(updates_to(some, target) for some in by_rate.values()))
            for target in RATE_TARGETS
        ),
    ]
    return markdown(["rate", *(f"{rate:g}" for rate in by_rate)], rows)


def updates_to(curves: Curves, target: float) -> str:
    if not curves:
        return NONE
    mean = results.updates_to(curves, target)
    return NEVER if math.isnan(mean) else f"{mean:.0f}"


def first_epoch(found: Found[Trial, Point], length: Length = FULL) -> str:
    """The tuning of each configuration: the tuned rate and the two below, after the first epoch and at the end."""
    shares = (0.25, 0.5, 1.0)
    rows = []
    for name in (name for both in zip(*_names(), strict=True) for name in both):
        curves, best = results.tuning_curves(found, name), results.tuned_rate(found, name, length)
        if best is None:
            continue
        there = [curves.get(share * best) for share in shares]
        ended = [[NONE if one is None else f"{100 * one[at].measure:.1f}" for one in there] for at in (0, -1)]
        rows.append((name, curves[best][0].update, f"{best:g}", *ended[0], *ended[1]))
    head = ["workers", "updates in epoch 1", "tuned rate R"]
    for epoch in (1, length.tuning_epochs):
        head += [f"after epoch {epoch}, %: R/4", "R/2", "R"]
    return markdown(head, rows)


def early(found: Found[Trial, Point]) -> str:
    """Updates of small and tuned rates to accuracies in the first epochs."""
    rows = [
        (
            quorum,
            "average" if average else "last",
            f"{rate:g}",
            *(updates_to(curves, target) for target in EARLY_TARGETS),
            f"{100 * results.ends(curves).mean:.1f}",
        )
        for quorum in EARLY_QUORUMS
        for average in (AVERAGE_EPOCHS, 0.0)
        for rate, curves in results.early(found, quorum, average).items()
    ]
    targets = [f"updates to {100 * target:g} %" for target in EARLY_TARGETS]
    return markdown(("N", "parameters measured", "rate", *targets, "at the end, %"), rows)


# ---------------------------------------------------------------- the grid


def updates(found: Found[Trial, Point], length: Length = FULL) -> str:
    """Updates to an accuracy by quorum without backups, and the exponent, without and with them."""
    none = min(length.grid_backups)
    rows = []
    for target in TARGETS:
        cells = [updates_to(results.split(found, quorum, none, length), target) for quorum in length.grid]
        exponents = [results.grid_exponent(found, backups, target, length) for backups in (none, GRID_BACKUPS)]
        rows.append((f"{100 * target:g} %", *cells, *map(signed, exponents)))
    head = ("updates to", *(f"N = {quorum}" for quorum in length.grid))
    return markdown((*head, f"exponent, b = {none}", f"exponent, b = {GRID_BACKUPS}"), rows)


def signed(spread: Spread | None) -> str:
    """With a real minus."""
    return NONE if spread is None else spread.text(2).replace("-", "−")


def splits(found: Found[Trial, Point], rounds: Found[Split, Seconds], length: Length = FULL) -> str:
    """Every split: seconds a round, and accuracy at the end where it was trained."""
    rows: list[list[str]] = []
    for quorum in length.grid:
        timed = [results.seconds_a_round(rounds, quorum, backups) for backups in length.grid_backups]
        ends = [accuracy(results.split(found, quorum, backups, length)) for backups in length.grid_backups]
        rows.append([str(quorum), *(NONE if one is None else one.text(2) for one in timed), *ends])
    head = [f"s a round, b = {length.grid_backups[0]}", *(f"b = {one}" for one in length.grid_backups[1:])]
    head += [f"accuracy in %, b = {length.grid_backups[0]}", *(f"b = {one}" for one in length.grid_backups[1:])]
    return markdown(["N", *head], rows)
