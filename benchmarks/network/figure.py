"""Bars of iterations/s by contender, as the paper on asynchronous gradient descent has them: a panel a net and ratio.

python -m benchmarks.network.figure REPORT.json FIGURE.png draws them again from what `--json` gave.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

Panel = list[dict[str, Any]]  # the rows of a net and ratio

COLOURS = {
    "blocking": "#9aa0a6",
    "ddp": "#5f6368",
    "ddp-small": "#3c4043",
    "ours": "#1f6feb",
    "delayed1": "#2da44e",
    "delayed2": "#1a7f37",
    "delayed3": "#116329",
}
SHORT = {
    "blocking": "blocking",
    "ddp": "DDP",
    "ddp-small": "DDP 1 MB",
    "ours": "ours",
    "delayed1": "delay 1",
    "delayed2": "delay 2",
    "delayed3": "delay 3",
}


def draw(report: dict[str, Any], path: Path) -> None:
    """A row of panels for each net; the lines are what computation and communication alone would allow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    panels = [list(group) for _, group in groupby(report["rows"], lambda row: (row["net"], row["ratio"]))]
    swept = [net for net, of_net in _by_net(panels).items() if len(of_net) > 1]
    panels = [panel for panel in panels if panel[0]["net"] in swept or not swept]  # one panel alone would waste a row
    nets = list(_by_net(panels))
    ratios = list(dict.fromkeys(panel[0]["ratio"] for panel in panels))
    size = (0.6 + 2.3 * len(ratios), 0.7 + 2.3 * len(nets))
    drawing, grid = pyplot.subplots(len(nets), len(ratios), figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat:
        axes.set_visible(False)
    for panel in panels:
        axes = grid[nets.index(panel[0]["net"])][ratios.index(panel[0]["ratio"])]
        axes.set_visible(True)
        _bars(axes, panel)
    colours = {"computation alone": "#b3261e", "communication alone": "#c77700"}
    lines = [Line2D([], [], color=colour, linestyle="--") for colour in colours.values()]
    drawing.legend(lines, list(colours), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    drawing.supylabel("iterations/s", fontsize=9)
    drawing.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(drawing)


def _by_net(panels: list[Panel]) -> dict[str, list[Panel]]:
    nets = dict.fromkeys(panel[0]["net"] for panel in panels)
    return {net: [panel for panel in panels if panel[0]["net"] == net] for net in nets}


def _bars(axes: Any, panel: Panel) -> None:
    rates = {row["contender"]: row["iterations_per_s"] for row in panel if row["iterations_per_s"] is not None}
    bars = [name for name in COLOURS if name in rates]
    drawn = axes.bar([SHORT[name] for name in bars], [rates[name] for name in bars], color=[COLOURS[n] for n in bars])
    axes.bar_label(drawn, fmt="%.1f", fontsize=7, label_type="center", color="white")
    tallest = max((rates[name] for name in bars), default=1.0)
    top = 1.3 * max(tallest, rates.get("none", 0.0))
    for name, colour, first in (("none", "#b3261e", 0), ("comm", "#c77700", 4)):  # both show where they meet
        if name in rates and rates[name] < top:  # far above the bars it would only flatten them
            axes.axhline(rates[name], color=colour, linestyle=(first, (4, 4)), linewidth=1.2)
    axes.set_ylim(0, top)
    ratio = panel[0]["ratio"]
    what = "no rate limit" if ratio is None else f"communication {ratio:g}×"
    axes.set_title(f"{panel[0]['net']}, {what}", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.tick_params(axis="x", rotation=60)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    if len(sys.argv) != 3:
        print("Give the report that --json wrote and the .png file to draw.", file=sys.stderr)
        return 2
    source, target = map(Path, sys.argv[1:])
    try:
        report = json.loads(source.read_text())
        rows = report["rows"]
    except (OSError, ValueError, KeyError, TypeError):
        print(f"{source} is no report of `python -m benchmarks.network --json`.", file=sys.stderr)
        return 2
    if not rows or target.suffix != ".png" or not target.parent.is_dir():
        print("The report must have rows, and the figure be a .png file in a folder that exists.", file=sys.stderr)
        return 2
    draw(report, target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
