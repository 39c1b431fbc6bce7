"""The first paper's tables: Chen et al., Revisiting Distributed Synchronous SGD, beside ours."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from experiments.common.race_tables import seconds_to
from experiments.common.spread import Spread, markdown, spread_of
from experiments.inception import results as inception
from experiments.inception import tables as inception_tables
from experiments.inception.settings import ASYNC, SYNC
from experiments.layers import tables as layers
from experiments.layers.study import EQUAL, MODES, USUAL
from experiments.layers.timing import FORWARD
from experiments.pages.found import found
from experiments.pixelcnn import results as pixelcnn
from experiments.pixelcnn.settings import FULL as PIXELCNN
from experiments.pixelcnn.settings import ONE
from experiments.published import CHEN, shown
from experiments.staleness import tables as staleness
from experiments.staleness.settings import FULL as STALENESS
from experiments.stragglers import published
from experiments.stragglers.choosing import Choice, by_seed, choice, estimated_hours
from experiments.stragglers.simulated import MEAN
from experiments.stragglers.tables import SHOWN_LEVELS, of_world
from experiments.stragglers.worlds import MEASURED

#: Accuracies, in per cent, to which the updates of our Inception are counted.
TARGETS = (50, 60, 65, 70)
#: What a table has where there is nothing, and where a target is never reached.
NONE, NEVER = "–", "never"


def signed(value: float, digits: int = 2) -> str:
    """With a real minus."""
    return f"{value:.{digits}f}".replace("-", "−")


# ---------------------------------------------------------------- staleness


def layer_staleness() -> str:
    rows: list[list[str]] = []
    seen = CHEN["layer_staleness"]
    cases = layers.cases(found("layers"))
    early, late = (
        next(
            seeds
            for trial, seeds in cases.items()
            if (trial.profile, trial.read, trial.write, trial.forward, trial.transit, trial.latency)
            == (EQUAL, *MODES[how], FORWARD, 0.0, USUAL)
        )
        for how in ("written by layer", "layer by layer")
    )
    for layer, name in ((18, "top (18)"), (12, "12"), (11, "11"), (1, "bottom (1)")):
        published_range, our_range = "", ""
        if str(layer) in seen["range"]:
            published_range = " ({} to {})".format(*seen["range"][str(layer)])
            ends = [statistics.fmean(getattr(one[layer - 1], end) for one in early) for end in ("low", "high")]
            our_range = f" ({ends[0]:.0f} to {ends[1]:.0f})"
        means = [layers.mean_at(seeds, layer).mean for seeds in (early, late)]
        rows.append(
            [name, f"{seen['mean'][str(layer)]}{published_range}", f"{means[0]:.1f}{our_range}", f"{means[1]:.1f}"]
        )
    head = ["layer", "published", "ours: all read at the start, each written at once"]
    return markdown([*head, "ours: each read when it is needed, written at once"], rows)


def figure_2() -> str:
    made = staleness.outcomes(found("staleness"), STALENESS)
    stalenesses = STALENESS.stalenesses
    rows = [
        ["published", *(f"{staleness.PAPER[one]:.2f}" for one in stalenesses)],
        ["ours", *(staleness.cell(made["ramp and rate", one]) for one in stalenesses)],
        ["ours, clipped", *(staleness.cell(made.get(("clip", one))) for one in stalenesses)],
    ]
    return markdown(["staleness", *map(str, stalenesses)], rows)


# ---------------------------------------------------------------- stragglers


def arrival_s(k: int, level: str) -> list[float]:
    """Ours, seed by seed: a quantile or the mean of the time until the k-th of 100 gradients."""
    runs = of_world(found("stragglers"), MEASURED).values()
    return [row.seconds for rows in runs for row in rows if (row.k, row.level) == (k, level)]


def figures_3_and_4() -> str:
    rows = []
    for k, quantiles in published.TIME_QUANTILES_S.items():
        by_level = dict(zip(published.LEVELS, quantiles, strict=True))
        theirs = [shown(by_level[level], 2) for level in SHOWN_LEVELS]
        rows.append([k, "published", *theirs, shown(published.MEAN_S[k], 2)])
        ours = [f"{statistics.fmean(arrival_s(k, str(level))):.2f}" for level in SHOWN_LEVELS]
        rows.append(["", "ours", *ours, spread_of(arrival_s(k, MEAN)).text(2)])
    return markdown(["k", "", *(f"{100 * level:.0f} %" for level in SHOWN_LEVELS), "mean"], rows)


def worst_quantile() -> float:
    """How far our quantiles are from the published ones of figure 3, at most, as a share."""
    return max(
        abs(statistics.fmean(ours) / theirs - 1)
        for k, quantiles in published.TIME_QUANTILES_S.items()
        for level, theirs in zip(published.LEVELS, quantiles, strict=True)
        if (ours := arrival_s(k, str(level)))
    )


def worst_mean() -> float:
    """The same for the means of figure 4."""
    return max(abs(statistics.fmean(arrival_s(k, MEAN)) / theirs - 1) for k, theirs in published.MEAN_S.items())


def choice_of_hours() -> Choice:
    return choice(by_seed(found("stragglers"), MEASURED, "cancel"))


def figure_6() -> str:
    seconds = by_seed(found("stragglers"), MEASURED, "cancel")
    hours = [estimated_hours(one) for one in seconds.values()]
    ours = {quorum: spread_of([one[quorum] for one in hours]) for quorum in published.HOURS}
    best = choice_of_hours()
    assert best.backups.lowest == best.backups.highest, "one best split in all seeds"
    chosen = published.WORKERS - round(best.backups.mean)
    theirs = published.BEST_QUORUM
    rows = [
        [
            "published",
            *_bold_at(theirs, {quorum: str(value) for quorum, value in published.HOURS.items()}),
            theirs,
            f"{published.HOURS[published.WORKERS] / published.HOURS[theirs]:.2f}",
        ],
        ["ours", *_bold_at(chosen, {n: spread.text(1) for n, spread in ours.items()}), chosen, best.gain.text(2)],
    ]
    return markdown(["N", *map(str, published.HOURS), "best", "100 / best"], rows)


def _bold_at(best: int, cells: dict[int, str]) -> list[str]:
    return [f"**{text}**" if key == best else text for key, text in cells.items()]


# ---------------------------------------------------------------- updates to converge


def published_exponent() -> float:
    few, many = min(published.ITERATIONS_THOUSANDS), max(published.ITERATIONS_THOUSANDS)
    return inception.exponent([published.ITERATIONS_THOUSANDS[few], published.ITERATIONS_THOUSANDS[many]], [few, many])


def figure_5() -> str:
    theirs = published.ITERATIONS_THOUSANDS
    row = ["published", *map(str, theirs.values()), signed(published_exponent())]
    return markdown(["N", *map(str, theirs), "exponent, 50 to 100"], [row])


def our_updates(target: int) -> dict[int, float]:
    """Updates of our Inception to an accuracy in per cent, by N; NaN: some seeds never get there."""
    finals = inception.finals(found("inception"))
    return {n: inception.updates_to(finals[f"sync {n}+{b}"], target / 100) for n, b in SYNC}


def our_exponent(target: int, few: int = 50, many: int = 100) -> Spread | None:
    """Between two numbers of workers, fitted seed by seed; None: some seeds never get there."""
    finals = inception.finals(found("inception"))
    both = {n: finals[f"sync {n}+{b}"] for n, b in SYNC if n in (few, many)}
    return inception.exponent_of(both, target / 100)


def figure_5_ours() -> str:
    rows = []
    for target in TARGETS:
        exponents = [inception_tables.signed(our_exponent(target, *between)) for between in ((50, 100), (100, 200))]
        rows.append([f"{target} %", *(f"{one:.0f}" for one in our_updates(target).values()), *exponents])
    return markdown(["updates to", *(f"N = {n}" for n, _ in SYNC), "exponent, 50 to 100", "100 to 200"], rows)


# ---------------------------------------------------------------- sync beside async


def figure_8() -> str:
    finals = inception.finals(found("inception"))
    rows = []
    for (n, b), workers in zip(SYNC, ASYNC, strict=True):
        names = f"sync {n}+{b}", f"async {workers}"
        theirs, ours = [], []
        for name, gradients in zip(names, (1, workers), strict=True):
            one = CHEN["fig8"][name]
            theirs += [f"{one['precision']:.4f}"[1:], one["rounds_thousands"]]
            theirs += [shown(one["seconds_a_round_digitised"], 2), one["hours"]]
            curves = finals[name]
            rounds = curves[0][-1].update / gradients
            hours = inception.hours(curves).mean
            ours += [inception.accuracy(curves).text(4).replace("0.", "."), shown(rounds / 1000, 2)]
            ours += [f"{3600 * hours / rounds:.2f}", f"{hours:.3f}"]
        rows += [[f"{n}+{b} and {workers}", "published", *theirs], ["", "ours", *ours]]
    of_each = ["precision", "rounds, thousands", "seconds a round", "hours"]
    head = ["workers", "", *(f"sync, {of_each[0]}", *of_each[1:]), *(f"async, {of_each[0]}", *of_each[1:])]
    return markdown(head, rows)


def initial_rates() -> str:
    theirs = CHEN["initial_rates_100_6"]
    ours = inception.by_rate(found("inception"), "sync 100+6")
    assert len(theirs) == len(ours)
    rows = [
        ["published precision, %", *(str(one["precision_pct"]) for one in theirs.values())],
        ["published iterations, thousands", *(str(one["updates_thousands"]) for one in theirs.values())],
        ["ours: rate", *(f"{rate:g}" for rate in ours)],
        ["ours: precision, %", *(inception.accuracy(curves).text(2, 100) for curves in ours.values())],
        *([f"ours: updates to {target} %", *map(_counted, updates_by_rate(target).values())] for target in (40, 60)),
        ["ours: updates in all (fixed)", *(str(curves[0][-1].update) for curves in ours.values())],
    ]
    return markdown(["published rate", *theirs], rows)


def _counted(updates: float) -> str:
    return "not in all seeds" if math.isnan(updates) else f"{updates:.0f}"


def updates_by_rate(target: int) -> dict[float, float]:
    """Updates of our 100+6 to an accuracy in per cent, by initial rate."""
    curves = inception.by_rate(found("inception"), "sync 100+6")
    return {rate: inception.updates_to(some, target / 100) for rate, some in curves.items()}


# ---------------------------------------------------------------- PixelCNN

PIXELCNN_LATENCY = PIXELCNN.latencies[0]
#: With rates of their own, and one step.
_RACED = [method.name for method in PIXELCNN.methods]


def pixelcnn_end(name: str, share: float = 1.0, times: float = 1.0) -> Spread | None:
    """Bits at the end of a share of the time with one step, at so many times the tuned rate; None: not run."""
    if name not in _RACED:
        return None
    curves = PIXELCNN.curves(name, found("pixelcnn"), PIXELCNN_LATENCY, PIXELCNN.part(share), times)
    return spread_of([PIXELCNN.final(points) for points in curves]) if curves else None


def pixelcnn_targets() -> list[float]:
    return PIXELCNN.all_targets(found("pixelcnn"), PIXELCNN_LATENCY)


def slow_end(name: str, times: float = 1.0) -> Spread | None:
    """Bits at the end of all of the time with the slow decay and clipping; None: not run."""
    return pixelcnn.end(PIXELCNN, found("pixelcnn"), name, times)


def slow_targets() -> list[float]:
    return pixelcnn.targets(PIXELCNN, found("pixelcnn"))


def slow_sooner(name: str, than: str = ONE) -> Spread:
    """Hours of another method to one worker's worst end over a method's, seed by seed, with the slow decay."""
    curves = [pixelcnn.best_curves(PIXELCNN, found("pixelcnn"), one) for one in (than, name)]
    reached = [seconds_to(PIXELCNN, some, slow_targets()[-1]) for some in curves]
    return spread_of([one / other for one, other in zip(*reached, strict=True)])


def figure_9() -> str:
    rows: list[Sequence[object]] = [
        [f"{nll} nats", "published", *(_published_hours(hours, name) for name in pixelcnn.METHODS)]
        for nll, hours in CHEN["fig9_hours_to_nll_digitised"].items()
    ]
    rows += [
        [f"{target:.3f} bits", "slow decay", *(_slow_hours(name, target) for name in pixelcnn.METHODS)]
        for target in slow_targets()
    ]
    rows += [
        [f"{target:.3f} bits", "one step", *(_hours(name, target) for name in pixelcnn.METHODS)]
        for target in pixelcnn_targets()
    ]
    for times in (1.0, 0.5):
        ends = _ends(slow_end(name, times) for name in pixelcnn.METHODS)
        rows.append([_end_of(1.0, times), "slow decay", *ends])
    for share, times in ((1.0, 1.0), (1.0, 0.5), (1 / 3, 1.0), (1 / 3, 0.5), (1 / 4, 1.0)):
        ends = _ends(pixelcnn_end(name, share, times) for name in pixelcnn.METHODS)
        rows.append([_end_of(share, times), "one step", *ends])
    return markdown(["NLL", "", *pixelcnn.METHODS], rows)


def _end_of(share: float, times: float) -> str:
    return f"bits at the end of {PIXELCNN.part(share) / 3600:.2f} hours" + (", half the rate" if times < 1 else "")


def _published_hours(hours: dict[str, float | None], name: str) -> float | str | None:
    if name not in hours:
        return NONE
    return NEVER if hours[name] is None else hours[name]


def _slow_hours(name: str, target: float) -> str:
    if not pixelcnn.best_curves(PIXELCNN, found("pixelcnn"), name):
        return NONE
    reached = pixelcnn.hours(PIXELCNN, found("pixelcnn"), name, target)
    return NEVER if reached is None else reached.text(2)


def _hours(name: str, target: float) -> str:
    curves = PIXELCNN.curves(name, found("pixelcnn"), PIXELCNN_LATENCY) if name in _RACED else []
    if not curves:
        return NONE
    seconds = seconds_to(PIXELCNN, curves, target)
    if len(seconds) < len(curves):
        return NEVER
    return spread_of([one / 3600 for one in seconds]).text(2)


def _ends(spreads: Iterable[Spread | None]) -> list[str]:
    return [NONE if spread is None else spread.text(3) for spread in spreads]
