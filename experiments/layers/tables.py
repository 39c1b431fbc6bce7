"""The study's tables, as Markdown."""

from __future__ import annotations

import math

from experiments.common.spread import Spread, markdown, spread_of
from experiments.layers.profiles import PROFILES
from experiments.layers.published import STALENESS
from experiments.layers.study import (
    ALONE,
    EQUAL,
    LATENCIES,
    MODES,
    USUAL,
    Depth,
    Point,
    Staleness,
    Training,
    TrainingsFound,
)
from experiments.layers.timing import FORWARD, timing_of

DepthsFound = dict[Depth, list[Staleness]]


def text(depths: DepthsFound, trainings: TrainingsFound) -> str:
    """All tables, one after the other."""
    return "\n".join(
        [
            "# Layer staleness: tables\n",
            "Made by `python -m experiments.layers figures`; ± is the 95 % interval of the mean over seeds.\n",
            "## Mean staleness in updates, by depth\n",
            by_depth(depths),
            "## Lowest to highest staleness, and where 95 % of it lie (equal layers, read early, written at once)\n",
            ranges(depths),
            "## Trainings at the best rate of each mode\n",
            best_trainings(trainings),
            "## The tuning: test loss by learning rate (one seed)\n",
            tuning(trainings),
        ]
    )


def cases(depths: DepthsFound) -> dict[Depth, list[list[Staleness]]]:
    """Seeds of the same case together, under its first."""
    found: dict[Depth, list[list[Staleness]]] = {}
    first: dict[tuple[object, ...], Depth] = {}
    for trial, rows in depths.items():
        key = (trial.profile, trial.read, trial.write, trial.forward, trial.transit, trial.latency)
        found.setdefault(first.setdefault(key, trial), []).append(rows)
    return found


def mean_at(seeds: list[list[Staleness]], layer: int) -> Spread:
    """Of a layer of 18, bottom first; in a net with fewer, the one at the same depth."""
    layers = len(seeds[0])
    place = round((layer - 1) / 17 * (layers - 1))
    return spread_of([rows[place].mean for rows in seeds])


def by_depth(depths: DepthsFound) -> str:
    """The four layers the paper names, in every case; beside them what the share of a step says."""
    lines: list[list[object]] = [
        ["published", "", "", "", *(f"**{STALENESS[layer].mean:.1f}**" for layer in STALENESS)]
    ]
    for trial, seeds in cases(depths).items():
        if trial.latency != USUAL:
            continue
        windows = timing_of(
            PROFILES[trial.profile], read=trial.read, write=trial.write, forward=trial.forward, transit=trial.transit
        ).windows()
        cells = []
        for layer in STALENESS:
            place = round((layer - 1) / 17 * (len(windows) - 1))
            cells.append(f"{mean_at(seeds, layer).text(1)} ({(trial.workers - 1) * windows[place]:.1f})")
        how = f"read {trial.read}, written {trial.write}"
        lines.append([trial.profile, how, f"{trial.forward:.2f}", f"{trial.transit:g}", *cells])
    head = ["times of layers", "how", "forward", "transit", *(f"layer {layer}" for layer in STALENESS)]
    return "In brackets: (n − 1) times the share of a step between read and write.\n\n" + markdown(head, lines)


def is_spread(trial: Depth) -> bool:
    """Whether the case is one of those that show how staleness spreads: read early, written at once."""
    how = (trial.profile, trial.read, trial.write, trial.forward, trial.transit)
    return how == (EQUAL, *MODES["written by layer"], FORWARD, 0.0)


def ranges(depths: DepthsFound) -> str:
    """How far staleness spreads, by how workers' times differ."""
    lines = [["published", *(f"{seen.lowest:.0f} to {seen.highest:.0f}" for seen in (STALENESS[1], STALENESS[18]))]]
    names = {latency: name for name, latency in LATENCIES.items()}
    for trial, seeds in cases(depths).items():
        if is_spread(trial):
            cells = []
            for place in (0, -1):
                low, high = min(rows[place].lowest for rows in seeds), max(rows[place].highest for rows in seeds)
                inner = [
                    spread_of([float(getattr(rows[place], one)) for rows in seeds]).mean for one in ("low", "high")
                ]
                cells.append(f"{low} to {high} (95 %: {inner[0]:.0f} to {inner[1]:.0f})")
            lines.append([names[trial.latency], *cells])
    return markdown(["steps of workers", "bottom layer", "top layer"], lines)


def finals(trainings: TrainingsFound, mode: str) -> dict[Training, list[Point]]:
    """The trainings of a mode at its chosen rate."""
    return {trial: points for trial, points in trainings.items() if trial.mode == mode and trial.seed > 0}


def best_trainings(trainings: TrainingsFound) -> str:
    """Accuracy and test loss at the end, by mode."""
    lines = []
    for mode in (*MODES, ALONE):
        found = finals(trainings, mode)
        if not found:
            continue
        ends = [points[-1] for points in found.values()]
        sound = [end for end in ends if not end.diverged]
        lines.append(
            [
                mode,
                f"{next(iter(found)).lr:g}",
                spread_of([end.staleness for end in ends]).text(1),
                spread_of([end.accuracy for end in sound]).text(1, 100) if sound else "–",
                spread_of([end.test_loss for end in sound]).text(3) if sound else "–",
                len(ends) - len(sound),
            ]
        )
    return markdown(["mode", "rate", "mean staleness of layers", "test accuracy, %", "test loss", "diverged"], lines)


def tuning(trainings: TrainingsFound) -> str:
    """What every rate came to."""
    tried = sorted({trial.lr for trial in trainings if trial.seed == 0})
    lines = []
    for mode in (*MODES, ALONE):
        by_rate = {
            trial.lr: points[-1] for trial, points in trainings.items() if trial.seed == 0 and trial.mode == mode
        }
        lines.append([mode, *(_end(by_rate.get(lr)) for lr in tried)])
    return markdown(["mode", *(f"{lr:g}" for lr in tried)], lines)


def _end(point: Point | None) -> str:
    if point is None:
        return ""
    return "diverged" if point.diverged or not math.isfinite(point.test_loss) else f"{point.test_loss:.3f}"
