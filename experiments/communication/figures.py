"""The study's figures, from its table alone."""

from __future__ import annotations

from pathlib import Path

from experiments.common.drawing import band, figure_in
from experiments.communication.choosing import Found, bought, by_backups, quorum_of
from experiments.communication.layouts import ALL_REDUCE, FREE, LAYOUTS
from experiments.communication.study import MEASURED, WORLDS

COLOURS = {
    FREE: "#7F7F7F",
    "one server": "#D55E00",
    "10 shards": "#E69F00",
    "80 shards": "#0072B2",
    ALL_REDUCE: "#000000",
}


def draw_costs(file: Path, found: Found) -> None:
    """Seconds, bytes and seconds in vain by backups, in the measured world."""
    quorum = quorum_of(found)
    with figure_in(file, 1, 3, (11.0, 3.6)) as (seconds, wasted_bytes, wasted_s):
        for layout in LAYOUTS:
            for late, looks in (("cancel", "-"), ("finish", ":")):
                costs = by_backups(found, MEASURED, layout, late, quorum)
                if not costs:
                    continue
                seeds = range(len(costs[0]))
                name = f"{layout} (formula)" if layout == ALL_REDUCE else layout
                label = name if late == "cancel" else "_hidden"
                curves = [
                    [(float(b), costs[b][seed].seconds / costs[0][seed].seconds) for b in costs] for seed in seeds
                ]
                band(seconds, curves, COLOURS[layout], label, ls=looks)
                curves = [
                    [(float(b), 100 * costs[b][seed].bytes_wasted / costs[b][seed].bytes_sent) for b in costs]
                    for seed in seeds
                ]
                if layout != FREE:  # the same bytes as with a server
                    band(wasted_bytes, curves, COLOURS[layout], label, ls=looks)
                curves = [
                    [(float(b), 100 * costs[b][seed].wasted_s / costs[b][seed].busy_s) for b in costs] for seed in seeds
                ]
                if layout != ALL_REDUCE:  # the same computing as with a free network
                    band(wasted_s, curves, COLOURS[layout], label, ls=looks)
        seconds.set(ylabel="seconds of an update over those of b = 0", ylim=(0, None))
        wasted_bytes.set(ylabel="bytes in vain, %", ylim=(0, None))
        wasted_s.set(ylabel="worker seconds in vain, %", ylim=(0, None))
        for axes in (seconds, wasted_bytes, wasted_s):
            axes.set(xlabel=f"backups beside a quorum of {quorum}")
        seconds.legend(frameon=False, fontsize=8, loc="lower right")
        seconds.set_title("late work: lines cancelled, dots finished", fontsize=9)


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
        panels[1].legend(frameon=False, fontsize=8, loc="best")
