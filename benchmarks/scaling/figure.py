"""Seconds of communication over the number of machines, on paper."""

from __future__ import annotations

from pathlib import Path

from experiments.common.drawing import figure_in, outer_legend, ticks

from benchmarks.scaling.links import ring_s, shared_s
from benchmarks.scaling.paper import SIZES, load, rate

COUNTS = (2, 4, 8, 16, 32, 64, 100, 128, 256, 512, 1000)


def draw(path: Path) -> None:
    """350M parameters at 100 Gbit/s: one server, 8 and 64 shards, one shard a machine, all-reduce."""
    parameters, link = SIZES["350M"], rate(100)
    loads = {machines: load(parameters, machines) for machines in COUNTS}
    lines = {
        "one server": [shared_s(one, link) for one in loads.values()],
        "8 shards": [shared_s(one, link, 8) for one in loads.values()],
        "64 shards": [shared_s(one, link, 64) for one in loads.values()],
        "a shard on each worker's machine": [shared_s(one, link, n, on_workers=True) for n, one in loads.items()],
        "ring all-reduce": [ring_s(one, link) for one in loads.values()],
    }
    colours = ("#D55E00", "#E69F00", "#CC79A7", "#0072B2", "#000000")
    with figure_in(path, height=3.8) as axes:
        for (name, seconds), colour in zip(lines.items(), colours, strict=True):
            axes.plot(COUNTS, seconds, label=name, color=colour, ls="--" if name.startswith("ring") else "-")
        axes.axhspan(1.4, 2.6, color="#888888", alpha=0.2, lw=0, label="a step of the measured cluster")
        axes.set(xscale="log", yscale="log", xlabel="machines", ylabel="seconds of communication an update")
        ticks(axes, "x", [2, 8, 32, 100, 1000], ["2", "8", "32", "100", "1,000"])
        ticks(axes, "y", [0.1, 1, 10, 100])
        outer_legend([axes], 3)
