"""The study's figures, from its table alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from experiments.common.drawing import figure_in, legend_under, outer_legend, ticks
from experiments.communication.choosing import Found, bought, by_backups, quorum_of
from experiments.communication.layouts import ALL_REDUCE, FREE, LAYOUTS
from experiments.communication.study import MEASURED, WORLDS, Cost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    FREE: "#7F7F7F",
    "one server": "#D55E00",
    "10 shards": "#E69F00",
    "80 shards": "#0072B2",
    ALL_REDUCE: "#000000",
}


def draw_costs(file: Path, found: Found) -> None:
    """Seconds, bytes and seconds in vain by backups, in the measured world: means; intervals are in the table.

    Seconds are shown where late work is cancelled: where it finishes they are nearly the same.
    """
    quorum = quorum_of(found)
    with figure_in(file, 1, 3, 3.8) as panels:
        seconds, wasted_bytes, wasted_s = panels

        def draw(axes: Axes, layout: str, value: Callable[[Cost], float], late: str = "cancel", **looks: Any) -> None:
            costs = by_backups(found, MEASURED, layout, late, quorum)
            means = [fmean(value(cost) for cost in seeds) for seeds in costs.values()]
            axes.plot(list(costs), means, **{"color": COLOURS[layout], "marker": "o", "ms": 3, **looks})

        for layout in COLOURS:
            name = f"{layout} (formula)" if layout == ALL_REDUCE else layout
            dashed: dict[str, Any] = (
                {"ls": "--", "zorder": 3} if layout in (ALL_REDUCE, FREE) else {}
            )  # each lies on another line
            draw(seconds, layout, lambda cost: cost.seconds, label=name, **dashed)
            if layout != ALL_REDUCE:  # the same computing as with a free network
                draw(wasted_s, layout, lambda cost: 100 * cost.wasted_s / cost.busy_s, **dashed)
        ways: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
            ("servers, late work cancelled", "10 shards", "cancel", {"color": "#009E73"}),
            ("servers, late work finishes", "10 shards", "finish", {"color": "#009E73", "ls": ":"}),
            ("all-reduce (formula)", ALL_REDUCE, "cancel", {"ls": "--"}),
        )
        for name, layout, late, looks in ways:  # the same bytes with one server as with many
            draw(wasted_bytes, layout, _bytes_in_vain, late, label=name, **looks)
        seconds.set(title="an update, virtual seconds", yscale="log")
        ticks(seconds, "y", [1.5, 2, 3, 4, 6, 8])
        wasted_bytes.set(title="bytes sent in vain, %", ylim=(0, None))
        wasted_s.set(title="seconds computed in vain, %", ylim=(0, None))
        for axes in panels:
            axes.set(xlabel=f"backups beside a quorum of {quorum}")
        outer_legend([seconds])
        legend_under(wasted_bytes, 1)


def _bytes_in_vain(cost: Cost) -> float:
    return 100 * cost.bytes_wasted / cost.bytes_sent


def draw_bought(file: Path, found: Found) -> None:
    """What 5 % more machines buy: one dot a world and layout."""
    quorum = quorum_of(found)
    more = min({trial.quorum - quorum for trial in found} - {0})
    worlds = [world for world in WORLDS if bought(found, world, FREE, more)]
    with figure_in(file, 1, 2, 0.5 * len(worlds) + 1.6, sharey=True) as panels:
        for axes, role in zip(panels, ("as_backups", "as_workers"), strict=True):
            for place, layout in enumerate(LAYOUTS):
                for line, world in enumerate(worlds):
                    one = bought(found, world, layout, more)
                    assert one is not None
                    spread = getattr(one, role)
                    axes.errorbar(
                        spread.mean,
                        line + 0.14 * (place - 2),
                        xerr=spread.half_width,
                        fmt="o",
                        ms=4,
                        color=COLOURS[layout],
                        label=layout if line == 0 else None,
                    )
            axes.axvline(1.0, color="#999999", lw=0.8)
            share = more / quorum
            axes.axvline(1 + share, color="#000000", lw=0.8, ls="--", label=f"{share:.0%} more speed")
            axes.set_yticks(range(len(worlds)), worlds)
            axes.set(
                xlabel=f"times as soon at a target as with {quorum}",
                title=f"{share:.0%} more machines, as {role.removeprefix('as_')}",
            )
        panels[0].invert_yaxis()
        outer_legend(panels, 3)
