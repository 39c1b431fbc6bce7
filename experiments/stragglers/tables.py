"""The study's tables, as Markdown."""

from __future__ import annotations

import statistics

from experiments.common.spread import markdown, spread_of
from experiments.stragglers import published
from experiments.stragglers.choosing import Found, by_seed, choice, estimated_hours, time_to_target
from experiments.stragglers.measured import CONTENDING, KEPT, PLANNED, Processes
from experiments.stragglers.simulated import MEAN, Arrival, Rounds
from experiments.stragglers.worlds import MEASURED, WORLDS

MeasuredFound = dict[Processes, list[Arrival]]
SHOWN_LEVELS = (0.1, 0.5, 0.8, 0.9, 0.95, 0.99)


def text(found: Found, processes: MeasuredFound) -> str:
    """All tables, one after the other."""
    parts = [
        "# Stragglers: tables\n",
        "Made by `python -m experiments.stragglers figures`; ± is the 95 % interval of the mean over seeds.\n",
    ]
    has_paper = any(trial.machines == published.WORKERS for trial in found)
    if has_paper:
        parts += ["## Seconds until the k-th of 100 gradients: simulated (published)\n", arrivals(found)]
        parts += ["## Estimated hours by quorum N, N + b = 100\n", hours(found)]
    parts += ["## The best split of other worlds\n", splits(found)]
    parts += ["## Real processes of one machine\n", measured_arrivals(processes), measured_splits(processes)]
    if any(trial.delay == CONTENDING for trial in processes):
        parts += ["## Processes that only compute: milliseconds until the k-th gradient\n", contending(processes)]
    return "\n".join(parts)


def of_world(found: Found, world: str) -> dict[Rounds, list[Arrival]]:
    """The full-sync runs of a world, which show every arrival."""
    return {trial: rows for trial, rows in found.items() if trial.world == world and trial.quorum == trial.machines}


def arrivals(found: Found) -> str:
    """Quantiles and means beside the paper's."""
    runs = of_world(found, MEASURED).values()

    def mean_of(k: int, level: str) -> float:
        return statistics.fmean(row.seconds for rows in runs for row in rows if row.k == k and row.level == level)

    lines = []
    for k, quantiles in published.TIME_QUANTILES_S.items():
        by_level = dict(zip(published.LEVELS, quantiles, strict=True))
        cells = [f"{mean_of(k, str(level)):.2f} ({by_level[level]:.2f})" for level in SHOWN_LEVELS]
        mean = spread_of([row.seconds for rows in runs for row in rows if row.k == k and row.level == MEAN])
        lines.append([k, *cells, f"{mean.text(2)} ({published.MEAN_S[k]:.2f})"])
    return markdown(["k", *(f"{level:.0%}" for level in SHOWN_LEVELS), "mean"], lines)


def hours(found: Found) -> str:
    """Figure 6 again."""
    by_quorum: dict[int, list[float]] = {}
    seconds = by_seed(found, MEASURED, "cancel")
    for one in seconds.values():
        for quorum, value in estimated_hours(one).items():
            by_quorum.setdefault(quorum, []).append(value)
    lines = [[n, spread_of(by_quorum[n]).text(2), f"{value:.2f}"] for n, value in published.HOURS.items()]
    best = choice(seconds)
    chosen = _range(published.WORKERS - best.backups.highest, published.WORKERS - best.backups.lowest)
    return markdown(["N", "ours, h", "published, h"], lines) + (
        f"\nBest quorum, by seed: {chosen} "
        f"(published: {published.BEST_QUORUM}); all 100 take {best.gain.text(2)} times as long as the best "
        f"(published: {published.HOURS[100] / published.HOURS[published.BEST_QUORUM]:.2f}).\n"
    )


def splits(found: Found) -> str:
    """The best split of each world, with late work cancelled or left to finish."""
    lines = []
    for world in WORLDS:
        cells: list[str] = []
        for late in ("cancel", "finish"):
            seconds = by_seed(found, world, late)
            if not seconds:
                break
            best = choice(seconds)
            cells += [_range(best.backups.lowest, best.backups.highest), f"× {best.gain.text(2)}"]
            cells += [_at_four(seconds)]
        if len(cells) == 6:
            lines.append([world, f"`{WORLDS[world].latency}`", *cells])
    head = ["world", "latency", "best b", "gain", "gain of 4 %", "best b, late work finishes", "gain", "gain of 4 %"]
    return markdown(head, lines)


def _at_four(seconds: dict[int, dict[int, float]]) -> str:
    """What 4 of 100 backups are worth, which is the paper's choice."""
    gains = []
    for one in seconds.values():
        quorum = round(0.96 * max(one))
        relative = time_to_target(one)
        if quorum in relative:
            gains.append(1 / relative[quorum])
    return f"× {spread_of(gains).text(2)}" if gains else "–"


def measured_arrivals(processes: MeasuredFound) -> str:
    """Time to the k-th gradient over that to the one in the middle: no absolute time of a noisy machine."""
    lines = []
    for (delay, neighbours), curves in relative_arrivals(processes).items():
        workers = len(curves[0])
        shown = sorted({1, workers // 2, workers - 3, workers - 2, workers - 1, workers} & set(range(1, workers + 1)))
        lines.append(
            [delay, neighbours, *(f"{k}: {spread_of([curve[k - 1] for curve in curves]).text(2)}" for k in shown)]
        )
    width = max(len(line) for line in lines) - 2
    return markdown(["delays", "neighbours", *(["k: time"] * width)], lines)


def relative_arrivals(processes: MeasuredFound) -> dict[tuple[str, int], list[list[float]]]:
    """By delay and neighbours, of each repeat of full sync: the mean time to each k over that to the middle one."""
    found: dict[tuple[str, int], list[list[float]]] = {}
    for trial, rows in processes.items():
        if trial.quorum == trial.workers:
            times = [row.seconds for row in sorted(rows) if row.level == MEAN]
            middle = times[max(0, len(times) // 2 - 1)]
            found.setdefault((trial.delay, trial.neighbours), []).append([time / middle for time in times])
    return found


def measured_splits(processes: MeasuredFound) -> str:
    """What a quorum's update really takes over what full sync's arrivals foretold, and gradients a second."""
    whole = {
        (trial.delay, trial.neighbours, trial.repeat): {row.k: row.seconds for row in rows if row.level == MEAN}
        for trial, rows in processes.items()
        if trial.quorum == trial.workers
    }
    pace: dict[tuple[str, int, int], list[float]] = {}
    foretold: dict[tuple[str, int, int], list[float]] = {}
    for trial, rows in processes.items():
        full = whole.get((trial.delay, trial.neighbours, trial.repeat))
        if full is None or trial.quorum == trial.workers:
            continue
        seconds = max(row for row in rows if row.level == MEAN).seconds
        key = (trial.delay, trial.neighbours, trial.workers - trial.quorum)
        pace.setdefault(key, []).append(trial.quorum / seconds / (trial.workers / full[trial.workers]))
        foretold.setdefault(key, []).append(seconds / full[trial.quorum])
    lines = [
        [
            delay,
            neighbours,
            b,
            spread_of(pace[delay, neighbours, b]).text(2),
            spread_of(foretold[delay, neighbours, b]).text(2),
        ]
        for delay, neighbours, b in pace
    ]
    return "\n" + markdown(
        ["delays", "neighbours", "b", "gradients a second over b = 0", "an update over the k-th arrival of full sync"],
        lines,
    )


def contending(processes: MeasuredFound) -> str:
    """Figure 3 of processes that contend for the cores, and what the planner makes of their trace."""
    full = [rows for trial, rows in processes.items() if trial.delay == CONTENDING and trial.quorum == trial.workers]
    workers = max(row.k for row in full[0])
    levels = [*(str(level) for level in SHOWN_LEVELS), MEAN]
    lines = []
    for k in sorted({1, workers // 2, *range(max(1, workers - 4), workers + 1, 2 if workers > 8 else 1)}):
        cells = []
        for level in levels:
            found = [1e3 * row.seconds for rows in full for row in rows if (row.k, row.level) == (k, level)]
            cells.append(spread_of(found).text(0))
        lines.append([k, *cells])
    table = markdown(["k", *(f"{level:.0%}" for level in SHOWN_LEVELS), "mean"], lines)
    advice = [(row.level, row.k) for rows in full for row in rows if row.level in (PLANNED, KEPT)]
    told = "; ".join(f"{level} {quorum}+{workers - quorum}" for level, quorum in advice)
    return f"{table}\nThe planner, from the trace of each full-sync run: {told}.\n"


def _range(low: float, high: float) -> str:
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
