"""What backups come to at one rate for all: their gain as updates times seconds per update, beside theory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from experiments.common.drawing import COLOURS, PUBLISHED, figure_in, in_words, outer_legend
from experiments.common.spread import Spread, markdown, spread_of
from experiments.common.to_target import Finish
from experiments.common.trials import Found
from experiments.contest.settings import BATCH, LATENCIES, TARGET
from experiments.contest.shared import BACKUPS, CHOOSING_SEEDS, MACHINES, RATES, SEEDS, Shared
from quorate.errors import BadInput
from quorate.latency import order_statistic_mean, parse_latency

#: D of S·(1 + D/N), in samples, as `experiments.rate` measured it on the same net with tuned plain SGD.
NOISE_SAMPLES = 31.0
#: Rounds that are drawn where an arrival has no formula.
ROUNDS = 4000


def ends(found: Found[Shared, Finish], latency: str, backups: int, lr: float, seeds: Sequence[int]) -> list[Finish]:
    """One training a seed; those that are there."""
    trials = [Shared(latency, backups, lr, seed) for seed in seeds]
    return [found[trial][0] for trial in trials if trial in found]


def best_rate(found: Found[Shared, Finish], latency: str, backups: int) -> float | None:
    """The rate that is soonest at the target, by the mean of the choosing seeds; None: nothing is there."""
    means = {}
    for rate in RATES:
        chosen = ends(found, latency, backups, rate, CHOOSING_SEEDS)
        if chosen:
            means[rate] = statistics.fmean(one.seconds for one in chosen)
    return min(means, key=means.__getitem__) if means else None


class Gain(NamedTuple):
    """What a number of backups comes to beside none; ratios are none over backups, so that more is better.

    by_rate: seconds at the shared rate over those at the backups' own best rate.
    """

    backups: int
    own_rate: float
    update_s: float  # seconds per update at the shared rate
    update_s_foretold: float
    updates: Spread  # at the shared rate
    seconds: Spread  # at the shared rate
    fewer_updates: Spread
    fewer_updates_foretold: float
    sooner: Spread
    sooner_foretold: float
    by_rate: Spread
    in_all: Spread


def gains(found: Found[Shared, Finish], latency: str) -> list[Gain]:
    """A line for each number of backups, at the rate that is best for none."""
    shared = best_rate(found, latency, 0)
    if shared is None:
        return []
    none = ends(found, latency, 0, shared, SEEDS)
    made = []
    for backups in BACKUPS:
        own_rate, some = best_rate(found, latency, backups), ends(found, latency, backups, shared, SEEDS)
        if own_rate is None or len(some) < len(none):
            continue
        own = ends(found, latency, backups, own_rate, SEEDS)
        foretold = _foretold_s(latency, backups)
        fewer = _law(MACHINES) / _law(MACHINES - backups)
        made.append(
            Gain(
                backups,
                own_rate,
                statistics.fmean(one.seconds for one in some) / statistics.fmean(one.updates for one in some),
                foretold,
                spread_of([one.updates for one in some]),
                spread_of([one.seconds for one in some]),
                _ratio([one.updates for one in none], [one.updates for one in some]),
                fewer,
                _ratio([one.seconds for one in none], [one.seconds for one in some]),
                fewer * _foretold_s(latency, 0) / foretold,
                _ratio([one.seconds for one in some], [one.seconds for one in own]),
                _ratio([one.seconds for one in none], [one.seconds for one in own]),
            )
        )
    return made


def _law(quorum: int) -> float:
    """Updates by (7) of docs/theory.md, over S."""
    return 1 + NOISE_SAMPLES / BATCH / quorum


@cache
def _foretold_s(latency: str, backups: int) -> float:
    """Mean seconds to the N-th of 16 arrivals: by formula where there is one, else of rounds that are drawn."""
    model = parse_latency(LATENCIES[latency])
    try:
        return float(order_statistic_mean(model, MACHINES, MACHINES - backups))
    except BadInput:
        draw = model.sampler(0, MACHINES)
        arrivals = (sorted(draw(worker, place, place, 0.0) for worker in range(MACHINES)) for place in range(ROUNDS))
        return statistics.fmean(one[MACHINES - backups - 1] for one in arrivals)


def _ratio(these: Sequence[float], others: Sequence[float]) -> Spread:
    """The ratio seed by seed: the geometric mean, and its 95 % interval to the higher side."""
    logs = spread_of([math.log(one / other) for one, other in zip(these, others, strict=True)])
    mean = math.exp(logs.mean)
    return Spread(mean, mean * math.expm1(logs.half_width), math.exp(logs.lowest), math.exp(logs.highest), logs.seeds)


HEAD = (
    "split",
    "s an update (theory)",
    "updates",
    "seconds",
    "fewer updates (theory)",
    "sooner (theory)",
    "own rate",
    "another rate gains",
    "sooner in all",
)


def summary(found: Found[Shared, Finish]) -> str:
    text = (
        f"\n# Backups at one rate for all: {MACHINES} machines, to {TARGET:.0%}, mean ± 95 % interval over "
        f"{len(SEEDS)} seeds\n\nAll have the rate that is best for full sync (by {len(CHOOSING_SEEDS)} other seeds). "
        "Ratios are full sync over backups, seed by seed; (theory) is (7)\nwith D = "
        f"{NOISE_SAMPLES:g} samples, and seconds to the N-th arrival.\n"
    )
    for latency in LATENCIES:
        rows = gains(found, latency)
        if rows:
            text += f"\n## {latency} (`{LATENCIES[latency]}`), rate {rows[0].own_rate:g}\n\n"
            text += markdown(HEAD, [line(row) for row in rows])
    return text


def line(row: Gain) -> list[str]:
    return [
        f"{MACHINES - row.backups}+{row.backups}",
        f"{row.update_s:.2f} ({row.update_s_foretold:.2f})",
        row.updates.text(1),
        row.seconds.text(1),
        f"{row.fewer_updates.text(2)} ({row.fewer_updates_foretold:.2f})",
        f"{row.sooner.text(2)} ({row.sooner_foretold:.2f})",
        f"{row.own_rate:g}",
        row.by_rate.text(2) if row.by_rate.half_width else "the same",
        row.in_all.text(2),
    ]


def draw(file: Path, found: Found[Shared, Finish]) -> None:
    """Times as soon as full sync, by the number of backups: theory, at one rate, and with rates of their own."""
    there = [latency for latency in LATENCIES if gains(found, latency)]
    with figure_in(file, 1, len(there), 3.4, squeeze=False) as drawn:
        for axes, latency in zip(drawn[0], there, strict=True):
            rows = gains(found, latency)
            at = list(range(len(rows)))
            axes.plot(at, [row.sooner_foretold for row in rows], "--", color=PUBLISHED, label="theory, one rate")
            for shift, (name, colour, spreads) in enumerate(
                (
                    ("full sync's rate for all", COLOURS["backup"], [row.sooner for row in rows]),
                    ("each its own rate", COLOURS["full-sync"], [row.in_all for row in rows]),
                )
            ):
                axes.errorbar(
                    [place + 0.1 * (2 * shift - 1) for place in at],
                    [one.mean for one in spreads],
                    yerr=[one.half_width for one in spreads],
                    fmt="o",
                    ms=4,
                    capsize=2,
                    color=colour,
                    label=name,
                )
            axes.axhline(1.0, color="#777777", lw=0.8, ls=":")
            axes.set_xticks(at, [str(row.backups) for row in rows])
            axes.set_ylim(0, None)
            axes.set_title(in_words(LATENCIES[latency]), fontsize=9.5)
        drawn[0][0].set_ylabel("times as soon as full sync")
        drawn[0][0].get_figure().supxlabel(f"backups of {MACHINES} machines", fontsize=9.5)
        outer_legend(drawn[0])
