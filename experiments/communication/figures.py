"""The study's figures, from its table alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from experiments.common.drawing import figure_in
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
    """Seconds, bytes and seconds in vain by backups, in the measured world: means; intervals are in the table."""
    quorum = quorum_of(found)
    with figure_in(file, 1, 3, (11.0, 3.8)) as (seconds, wasted_bytes, wasted_s):
        for layout, colour in COLOURS.items():
            for late, looks in (("cancel", "-"), ("finish", ":")):
                costs = by_backups(found, MEASURED, layout, late, quorum)
                if not costs:
                    continue
                name = f"{layout} (formula)" if layout == ALL_REDUCE else layout

                def draw(
                    axes: Axes,
                    value: Callable[[Cost], float],
                    label: str,
                    costs: dict[int, list[Cost]] = costs,
                    looks: tuple[str, str] = (colour, looks),
                ) -> None:
                    means = [fmean(value(cost) for cost in seeds) for seeds in costs.values()]
                    shown = label if looks[1] == "-" else None
                    axes.plot(list(costs), means, color=looks[0], ls=looks[1], label=shown, marker="o", ms=3)

                draw(seconds, lambda cost: cost.seconds, name)
                if layout in (ALL_REDUCE, "10 shards"):  # the same bytes with one server as with many
                    servers = layout != ALL_REDUCE
                    draw(
                        wasted_bytes,
                        lambda cost: 100 * cost.bytes_wasted / cost.bytes_sent,
                        "servers" if servers else name,
                    )
                if layout != ALL_REDUCE:  # the same computing as with a free network
                    draw(wasted_s, lambda cost: 100 * cost.wasted_s / cost.busy_s, name)
        seconds.set(ylabel="virtual seconds of an update", ylim=(0, None))
        wasted_bytes.set(ylabel="bytes in vain, %", ylim=(0, None))
        wasted_s.set(ylabel="worker seconds in vain, %", ylim=(0, None))
        for axes in (seconds, wasted_bytes, wasted_s):
            axes.set(xlabel=f"backups beside a quorum of {quorum}")
            axes.legend(frameon=False, fontsize=8, loc="center right" if axes is seconds else "upper left")
        wasted_bytes.set_title("late work: lines cancelled, dots finished", fontsize=9)


def draw_bought(file: Path, found: Found) -> None:
    """What 5 % more machines buy: one dot a world and layout."""
    quorum = quorum_of(found)
    more = min({trial.quorum - quorum for trial in found} - {0})
    worlds = [world for world in WORLDS if bought(found, world, FREE, more)]
    with figure_in(file, 1, 2, (9.6, 0.42 * len(worlds) + 1.6)) as panels:
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
            axes.axvline((quorum + more) / quorum, color="#000000", lw=0.8, ls=(0, (4, 3)))
            axes.set_yticks(range(len(worlds)), worlds if axes is panels[0] else [])
            axes.invert_yaxis()
            axes.set(
                xlabel="time to a target before over after",
                title=f"{more / quorum:.0%} more machines as {role.removeprefix('as_')}",
            )
        panels[0].legend(frameon=False, fontsize=8, loc="lower right")
