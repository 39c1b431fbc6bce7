"""The study's tables, as Markdown."""

from __future__ import annotations

from experiments.common.spread import markdown, spread_of
from experiments.communication.choosing import Found, bought, by_backups, quorum_of
from experiments.communication.layouts import ALL_REDUCE, LAYOUTS
from experiments.communication.study import MEASURED, WORLDS


def text(found: Found) -> str:
    """All tables, one after the other."""
    quorum = quorum_of(found)
    parts = [
        "# Communication: tables\n",
        "Made by `python -m experiments.communication figures`; ± is the 95 % interval of the mean over seeds.\n",
    ]
    for late in ("cancel", "finish"):
        parts += [
            f"## An update by backups, quorum {quorum}, measured arrivals, late work: {late}\n",
            costs(found, late),
        ]
    steps = sorted({trial.quorum - quorum for trial in found} - {0})
    for more in steps:
        parts += [
            f"## {more / quorum:.0%} more machines: a target is so many times sooner there (as backups; as workers)\n",
            speeds(found, more),
        ]
    return "\n".join(parts)


def costs(found: Found, late: str) -> str:
    """Bytes and seconds of an update."""
    lines = []
    for layout in LAYOUTS:
        for backups, seeds in by_backups(found, MEASURED, layout, late, quorum_of(found)).items():
            lines.append(
                [
                    layout + (" (formula)" if layout == ALL_REDUCE else ""),
                    backups,
                    spread_of([cost.seconds for cost in seeds]).text(2),
                    f"{spread_of([cost.bytes_sent for cost in seeds]).mean / 1e9:.2f}",
                    spread_of([cost.bytes_wasted / cost.bytes_sent for cost in seeds]).text(1, 100),
                    spread_of([cost.wasted_s / max(1e-12, cost.busy_s) for cost in seeds]).text(1, 100),
                    spread_of([cost.idle_s / (cost.idle_s + cost.busy_s) for cost in seeds]).text(1, 100),
                ]
            )
    head = ["layout", "b", "seconds", "GB moved", "bytes in vain, %", "worker seconds in vain, %", "waiting, %"]
    return markdown(head, lines)


def speeds(found: Found, more: int) -> str:
    """What more machines buy, by world and layout."""
    lines = []
    for world in WORLDS:
        cells = []
        for layout in LAYOUTS:
            one = bought(found, world, layout, more)
            cells.append("–" if one is None else f"{one.as_backups.text(3)}; {one.as_workers.text(3)}")
        if set(cells) != {"–"}:
            lines.append([world, *cells])
    return markdown(["world", *LAYOUTS], lines)
