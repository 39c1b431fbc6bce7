"""The figure of a comparison. matplotlib is imported only when a figure is drawn, and never opens a window."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.errors import BadInput, QuorateError
from quorate.policies import POLICIES, Policy
from quorate.reporting.comparison import VIRTUAL, ComparedRun, measure_of, seconds_are, time_to

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from quorate.stopping import Until

FORMATS = (".png", ".svg", ".pdf")
#: A policy has one colour in all figures.
COLOURS = {name: kind.colour for name, kind in POLICIES.items()}
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "svg.hashsalt": "quorate",
}


class MissingLibrary(QuorateError):  # noqa: N818 - says what to install
    """A library that only some commands need is not installed."""


def check_can_draw() -> None:
    """Refuse before a long run if matplotlib is missing, not after it."""
    if find_spec("matplotlib") is None:
        raise MissingLibrary("a figure needs matplotlib, which is not installed; type: pip install matplotlib")


def has_panels(outcomes: Sequence[ComparedRun]) -> bool:
    """Whether there is anything to draw."""
    return any(map(_learned, outcomes)) or _timed(outcomes) is not None


def draw_comparison(outcomes: Sequence[ComparedRun], target: Until | None, file: Path) -> None:
    """Left: loss or measure over time. Right: time to the k-th gradient in rounds that wait for all workers."""
    check_can_draw()
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    learned, timed = any(map(_learned, outcomes)), _timed(outcomes)
    widths = [1.6] * learned + [1.0] * (timed is not None)
    assert widths, "has_panels says so"
    with rc_context(STYLE):
        figure = Figure(
            figsize=(8.6 if len(widths) == 2 else 5.6, 3.7), dpi=200, layout=ConstrainedLayoutEngine(w_pad=0.1)
        )
        panels = list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
        if learned:
            axes = panels.pop(0)
            _draw_learning(axes, outcomes, target)
            handles, labels = axes.get_legend_handles_labels()
            columns = len(labels) if len(labels) <= 4 else -(-len(labels) // 2)
            figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, handlelength=2.6)
        if timed is not None:
            _draw_arrivals(panels.pop(0), timed, outcomes)
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata: dict[str, Any] = {"Date": None} if file.suffix == ".svg" else {}
        try:
            figure.savefig(file, metadata=metadata)
        except OSError as error:
            raise BadInput(f"figure {str(file)!r} cannot be written: {error.strerror}; name another file") from error


# ---------------------------------------------------------------- learning curves


def _learned(outcome: ComparedRun) -> bool:
    return bool(outcome.metrics.evaluations or outcome.metrics.loss.points)


def _draw_learning(axes: Axes, outcomes: Sequence[ComparedRun], target: Until | None) -> None:
    measure = measure_of(outcomes, target)
    seen: dict[str, int] = {}
    for outcome in outcomes:
        times, values = _curve(outcome, measure)
        again = seen[outcome.policy] = seen.get(outcome.policy, -1) + 1
        axes.plot(
            times,
            values,
            label=outcome.label,
            color=COLOURS.get(outcome.policy, Policy.colour),
            linestyle=("-", (0, (4, 1.5)), (0, (1, 1)))[min(again, 2)],
            linewidth=1.4,
        )
    if target is not None:
        axes.axhline(
            target.target, color="#555555", linewidth=1, linestyle=(0, (1, 2)), label=f"target {target.target:g}"
        )
    axes.set_xlim(0, _last_second(outcomes, target))
    engine = outcomes[0].metrics.header["engine"]
    delays = "" if engine.get("latency") is None else ", artificial delays"
    is_virtual = seconds_are(outcomes[0].metrics.header) == VIRTUAL
    axes.set_xlabel("virtual seconds" if is_virtual else f"seconds (real processes{delays})")
    axes.set_ylabel((measure or "training loss").replace("_", " "))


def _last_second(outcomes: Sequence[ComparedRun], target: Until | None) -> float:
    """End of the time axis: 1.3 times the time to the target for runs that reached it, the whole run for others."""
    reached = [None if target is None else time_to(outcome.metrics, target) for outcome in outcomes]
    ends = [outcome.metrics.seconds for outcome in outcomes]
    return max(end if first is None else min(end, 1.3 * first) for first, end in zip(reached, ends, strict=True)) or 1.0


def _curve(outcome: ComparedRun, measure: str | None) -> tuple[list[float], list[float]]:
    if measure is None:
        points = outcome.metrics.loss.points
        return [point[0] for point in points], [point[3] for point in points]
    found = [one for one in outcome.metrics.evaluations if measure in one.measures]
    return [one.time for one in found], [one.measures[measure] for one in found]


# ---------------------------------------------------------------- arrival times


def _timed(outcomes: Sequence[ComparedRun]) -> ComparedRun | None:
    """The run whose rounds wait for all workers: only there, every gradient is timed."""
    return next((one for one in outcomes if one.kth_arrivals), None)


def _draw_arrivals(axes: Axes, timed: ComparedRun, outcomes: Sequence[ComparedRun]) -> None:
    places = list(range(1, len(timed.kth_arrivals) + 1))
    means = [sum(times) / len(times) for times in timed.kth_arrivals]
    spread = [(_quantile(times, 0.1), _quantile(times, 0.9)) for times in timed.kth_arrivals]
    colour = COLOURS.get(timed.policy, Policy.colour)
    axes.fill_between(places, [low for low, _ in spread], [high for _, high in spread], color=colour, alpha=0.2, lw=0)
    axes.plot(places, means, "o-", color=colour, markersize=3.5, linewidth=1.6)
    top = max(max(high for _, high in spread), *means)
    for outcome in outcomes:
        policy = outcome.metrics.header["policy"]
        quorum = policy.get("quorum") if "backups" in policy else None
        if quorum is not None and 1 <= quorum < len(places):
            colour = COLOURS.get(outcome.policy, Policy.colour)
            axes.axvline(quorum, color=colour, linewidth=1, linestyle=(0, (1, 2)))
            axes.annotate(
                f"quorum of\n{outcome.label}",
                xy=(quorum, top),
                xytext=(-4, 0),
                textcoords="offset points",
                ha="right",
                va="top",
                color=colour,
                fontsize=8.5,
            )
    axes.set_title(f"{timed.label}: mean and 10–90% of rounds", loc="left", fontsize=9.5)
    axes.set_xlabel("k-th gradient of a round")
    axes.set_ylabel(f"{'virtual ' if seconds_are(timed.metrics.header) == VIRTUAL else ''}seconds until it arrives")
    axes.set_ylim(0, top * 1.06)
    if len(places) <= 16:
        axes.set_xticks(places)


def _quantile(values: list[float], level: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(level * (len(ordered) - 1)))]
