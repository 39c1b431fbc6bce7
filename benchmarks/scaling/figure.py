"""Seconds of communication over the number of machines, on paper."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scaling.links import ring_s, shared_s
from benchmarks.scaling.paper import SIZES, load, rate

COUNTS = (2, 4, 8, 16, 32, 64, 100, 128, 256, 512, 1000)


def draw(path: Path) -> None:
    """350M parameters at 100 Gbit/s: one server, 8 and 64 shards, one shard a machine, all-reduce."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parameters, link = SIZES["350M"], rate(100)
    loads = {machines: load(parameters, machines) for machines in COUNTS}
    lines = {
        "one server": [shared_s(one, link) for one in loads.values()],
        "8 shards": [shared_s(one, link, 8) for one in loads.values()],
        "64 shards": [shared_s(one, link, 64) for one in loads.values()],
        "a shard on each worker's machine": [shared_s(one, link, n, on_workers=True) for n, one in loads.items()],
        "ring all-reduce": [ring_s(one, link) for one in loads.values()],
    }
    drawing, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    colours = ("#b3261e", "#c77700", "#7a7a00", "#1f6feb", "#111111")
    for (name, seconds), colour in zip(lines.items(), colours, strict=True):
        axes.plot(COUNTS, seconds, label=name, color=colour, linestyle="--" if name.startswith("ring") else "-")
    axes.set(xscale="log", yscale="log", xlabel="machines", ylabel="seconds of communication an update")
    axes.set_xticks([2, 8, 32, 100, 1000], ["2", "8", "32", "100", "1,000"])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.axhspan(1.4, 2.6, color="#888888", alpha=0.2, linewidth=0)
    axes.text(2.1, 1.75, "a step of chen2016", fontsize=8, color="#555555")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    drawing.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(drawing)
