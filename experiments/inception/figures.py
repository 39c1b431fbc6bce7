"""Curves and tables of the study, from its table of curves alone."""

from __future__ import annotations

import math
from pathlib import Path

from experiments.common.curves import Point, first_reaching
from experiments.common.drawing import COLOURS, band, figure_in, outer_legend
from experiments.common.spread import Spread, markdown, spread_of
from experiments.common.trials import Found
from experiments.inception.settings import ASYNC, FULL, QUICK, SYNC, Trial, configurations, final_accuracy
from quorate.errors import BadInput

#: Test precision@1 and hours of Inception v3 on ImageNet (Chen et al. 2016, table of figure 8).
PUBLISHED = {
    "sync 50+3": (0.7835, 60.2),
    "sync 100+6": (0.7842, 32.2),
    "sync 200+12": (0.7813, 22.2),
    "async 53": (0.7788, 57.5),
    "async 106": (0.7786, 38.3),
    "async 212": (0.7752, 40.6),
}
_LINES = {53: "-", 106: "--", 212: ":"}

Curves = dict[str, list[tuple[Trial, list[Point]]]]


def draw_all(folder: Path, found: Found[Trial, Point]) -> list[Path]:
    """The figures and the summary; gives the files."""
    finals = _finals(found)
    if not finals:
        raise BadInput(f"there are no finished trainings in {str(folder)!r}; run the study first")
    _draw_curves(folder / "curves.png", finals)
    _draw_tuning(folder / "tuning.png", found)
    summary = folder / "summary.md"
    summary.write_text("\n".join([_table(finals), _pairs(finals), _targets(finals), _rates(found)]))
    return [folder / "curves.png", folder / "tuning.png", summary]


def _finals(found: Found[Trial, Point]) -> Curves:
    """By configuration, the trainings at its chosen rate: that with the most seeds, the best where several have."""
    by_name: dict[str, dict[float, list[tuple[Trial, list[Point]]]]] = {}
    for trial, points in sorted(found.items(), key=lambda item: item[0].seed):
        if trial.is_usual and not trial.is_tuning and trial.epochs in (FULL.epochs, QUICK.epochs):
            by_name.setdefault(trial.name, {}).setdefault(trial.lr, []).append((trial, points))
    chosen: Curves = {}
    for one in configurations():
        rates = by_name.get(one.name, {})
        if rates:
            tuned = _tuned_rate(one, found)
            chosen[one.name] = rates[tuned] if tuned in rates else next(iter(rates.values()))
    return chosen


def _tuned_rate(one: Trial, found: Found[Trial, Point]) -> float | None:
    tuning = {trial: points for trial, points in found.items() if trial.is_tuning and trial.name == one.name}
    return max(tuning, key=lambda trial: final_accuracy(tuning[trial])).lr if tuning else None


def _hours(points: list[Point]) -> float:
    return points[-1].seconds / 3600


def _accuracy(trainings: list[tuple[Trial, list[Point]]]) -> Spread:
    return spread_of([final_accuracy(points) for _, points in trainings])


def _table(finals: Curves) -> str:
    rows = []
    for name, trainings in finals.items():
        precision, hours = PUBLISHED[name]
        ours = spread_of([_hours(points) for _, points in trainings])
        rows.append(
            (
                name,
                f"{100 * precision:.2f}",
                f"{hours:.1f}",
                f"{trainings[0][0].lr:g}",
                _accuracy(trainings).text(2, 100),
                ours.text(3),
                trainings[0][1][-1].update,
                len(trainings),
            )
        )
    header = ("workers", "paper: precision", "paper: hours", "ours: rate", "accuracy", "hours", "updates", "seeds")
    return markdown(header, rows)


def _pairs(finals: Curves) -> str:
    """Sync beside async on as many machines: what it has more in the end, and who is first where both get to."""
    rows = []
    for sync, asynchronous in zip(SYNC, ASYNC, strict=True):
        one, other = finals.get(f"sync {sync[0]}+{sync[1]}"), finals.get(f"async {asynchronous}")
        if not one or not other:
            continue
        more = [final_accuracy(mine) - final_accuracy(yours) for (_, mine), (_, yours) in zip(one, other, strict=False)]
        # What the weaker one has in its worst seed.
        target = min(max(_measures(points)) for _, points in one + other)
        hours = [_hours_to(target, trainings) for trainings in (one, other)]
        means = [spread.mean for spread in hours if spread is not None]
        rows.append(
            (
                one[0][0].name,
                other[0][0].name,
                spread_of(more).text(1, 100),
                f"{100 * target:.1f}",
                *("never" if spread is None else spread.text(3) for spread in hours),
                f"{means[1] / means[0]:.2f}" if len(means) == 2 else "–",
            )
        )
    header = ("sync", "async", "points more", "common target", "sync: hours", "async: hours", "times as soon")
    return markdown(header, rows)


def _measures(points: list[Point]) -> list[float]:
    return [point.measure for point in points if not math.isnan(point.measure)] or [0.0]


def _hours_to(target: float, trainings: list[tuple[Trial, list[Point]]]) -> Spread | None:
    """None: some never get there."""
    reached = [first_reaching(points, target) for _, points in trainings]
    return spread_of([point.seconds / 3600 for point in reached if point]) if all(reached) else None


def _targets(finals: Curves) -> str:
    """Hours to accuracies that several reach: the lowest final one, and some below."""
    lowest = min(_accuracy(trainings).mean for trainings in finals.values())
    targets = sorted({round(lowest * share, 3) for share in (0.9, 0.95, 0.99)})
    rows = []
    for name, trainings in finals.items():
        times = [_hours_to(target, trainings) for target in targets]
        rows.append((name, *("never" if hours is None else hours.text(3) for hours in times)))
    return markdown(("hours to accuracy", *(f"{100 * target:.1f}" for target in targets)), rows)


def _rates(found: Found[Trial, Point]) -> str:
    """The paper's second table: the initial rate of 100+6."""
    by_rate: dict[float, list[list[Point]]] = {}
    for trial, points in found.items():
        if trial.name == "sync 100+6" and trial.is_usual and not trial.is_tuning:
            by_rate.setdefault(trial.lr, []).append(points)
    rows = [
        (
            f"{rate:g}",
            spread_of([final_accuracy(points) for points in some]).text(2, 100),
            some[0][-1].update,
            len(some),
        )
        for rate, some in sorted(by_rate.items())
    ]
    return markdown(("100+6, initial rate", "accuracy", "updates", "seeds"), rows)


def _looks(trial: Trial) -> dict[str, str]:
    """The colour is the policy's, the line shows how many workers there are."""
    return {"colour": COLOURS["backup" if trial.method == "sync" else "async"], "ls": _LINES[trial.workers]}


def _place(trial: Trial) -> tuple[int, str]:
    """In a legend async stands beside sync on as many machines."""
    return trial.workers, trial.method


def _draw_curves(file: Path, finals: Curves) -> None:
    with figure_in(file, 1, 2, 4.2, sharey=True) as (over_hours, over_epochs):
        for name, trainings in sorted(finals.items(), key=lambda item: _place(item[1][0][0])):
            looks = _looks(trainings[0][0])
            curves = [points for _, points in trainings]
            hours = [[(point.seconds / 3600, 100 * point.measure) for point in points] for points in curves]
            epochs = [
                [(point.samples / FULL.train_samples, 100 * point.measure) for point in points] for points in curves
            ]
            band(over_hours, hours, name=name, **looks)
            band(over_epochs, epochs, name=name, **looks)
        over_hours.set(xscale="log", xlabel="virtual hours", ylabel="test accuracy, %")
        over_hours.xaxis.set_major_formatter("{x:g}")
        over_epochs.set(xlabel="epochs of samples applied")
        over_epochs.xaxis.get_major_locator().set_params(integer=True)
        outer_legend([over_epochs], 3)


def _draw_tuning(file: Path, found: Found[Trial, Point]) -> None:
    with figure_in(file) as axes:
        for one in sorted(configurations(), key=_place):
            tried = sorted(
                (trial.lr, 100 * final_accuracy(points))
                for trial, points in found.items()
                if trial.is_tuning and trial.name == one.name
            )
            if tried:
                looks = _looks(one)
                axes.plot(*zip(*tried, strict=True), "o", ms=4, color=looks["colour"], ls=looks["ls"], label=one.name)
        axes.set(
            xscale="log",
            xlabel="initial learning rate",
            ylabel="accuracy on pictures held back,\nafter the short training, %",
        )
        outer_legend([axes], 3)
