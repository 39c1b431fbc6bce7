"""The figures of a report as files: a PNG and a CSV each."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.errors import BadInput
from quorate.reporting.figures import STYLE
from quorate.reporting.report.tables import Table, shares_of, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: The same colours as in the timeline of the page.
KIND_COLOURS = {"used": "#009e73", "dropped": "#e69f00", "cancelled": "#f3cf85", "lost": "#d55e00", "gone": "#4a4f57"}
_WAITING = "#e8ebef"
_MOST_BARS = 30


def draw(data: dict[str, Any], table: Table, file: Path) -> None:
    """One figure, as PNG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    apart = table.name in _PER_RUN
    runs = [run for run in data["runs"] if table.name != "arrivals-cdf" or run["arrivals"] is not None]
    panels = len(runs) if apart else 1
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6 + 2.6 * (panels - 1)), dpi=160, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(panels, 1, squeeze=False)[:, 0]
        if apart:
            for one, run in zip(axes, runs, strict=True):
                _PER_RUN[table.name](one, run)
        else:
            _draw_common(axes[0], data, table)
        figure.suptitle(_plain(table.title), fontsize=10.5)
        try:
            figure.savefig(file)
        except OSError as error:
            raise BadInput(f"figure {str(file)!r} cannot be written: {error.strerror}; name another folder") from error


def _plain(text: str) -> str:
    """Escape text from a trace for matplotlib: `$` starts a formula, and a leading underscore hides a label."""
    return text.replace("$", r"\$").lstrip("_") or "unnamed"


def _draw_common(axes: Axes, data: dict[str, Any], table: Table) -> None:
    runs, name = data["runs"], table.name
    if name == "plan":
        _plan(axes, data["plan"])
    elif name == "bytes":
        _bytes(axes, runs)
    elif name == "staleness":
        _staleness(axes, runs)
    elif name == "choices":
        for run in runs:
            if run["choices"]:
                changes = run["choices"]["changes"]
                times = [*(change["time"] for change in changes), run["summary"]["seconds"]]
                quorums = [change["quorum"] for change in changes]
                axes.step(times, [*quorums, quorums[-1]], where="post", **_look(run))
        axes.set(xlabel=_seconds(runs[0]), ylabel="quorum", ylim=(0, None))
        axes.legend(frameon=False)
    elif name == "arrivals-mean":
        for run in runs:
            if run["arrivals"]:
                means = run["arrivals"]["means"]
                axes.plot(range(1, len(means) + 1), means, **_look(run))
        axes.set(xlabel="k", ylabel=_seconds(runs[0]), ylim=(0, None))
        axes.legend(frameon=False)
    else:
        _curves(axes, runs, table)


def _look(run: dict[str, Any]) -> dict[str, Any]:
    line = (0, (4, 1.5)) if run["dashed"] else "-"
    return {"color": run["colour"], "linestyle": line, "label": _plain(run["label"]), "linewidth": 1.4}


def _seconds(run: dict[str, Any]) -> str:
    return "virtual seconds" if run["seconds_are"] == "virtual" else "seconds"


def _curves(axes: Axes, runs: list[dict[str, Any]], table: Table) -> None:
    for run in runs:
        curve = run["loss"] if table.name == "loss" else run["measures"].get(table.title)
        if curve is not None:
            values = [float("nan") if value is None else value for value in curve["value"]]
            axes.plot(curve["time"], values, **_look(run))
    axes.set_xlabel(_seconds(runs[0]))
    axes.legend(frameon=False)


def _staleness(axes: Axes, runs: list[dict[str, Any]]) -> None:
    width = 0.8 / len(runs)
    for index, run in enumerate(runs):
        bars = run["staleness"]
        places = [place + (index - (len(runs) - 1) / 2) * width for place in range(len(bars))]
        shares = [bar["tickets"] / max(1, run["summary"]["tickets"]["applied"]) for bar in bars]
        axes.bar(places, shares, width=width, color=run["colour"], label=_plain(run["label"]))
    bars = runs[0]["staleness"]
    step = max(1, len(bars) // 12)
    axes.set_xticks(range(0, len(bars), step), [str(bar["least"]) for bar in bars[::step]])
    axes.set(xlabel="versions made between reading and applying", ylabel="share of applied gradients")
    axes.legend(frameon=False)


def _bytes(axes: Axes, runs: list[dict[str, Any]]) -> None:
    sizes = [run["summary"]["bytes"] for run in runs]
    places = range(len(runs))
    used, wasted = ([size[name] / 1e6 for size in sizes] for name in ("used", "wasted"))
    axes.barh(places, used, color=KIND_COLOURS["used"], label="used")
    axes.barh(places, wasted, left=used, color=KIND_COLOURS["dropped"], label="wasted")
    axes.set_yticks(places, [_plain(run["label"]) for run in runs])
    axes.invert_yaxis()
    axes.set_xlabel("MB sent")
    axes.legend(frameon=False)


def _plan(axes: Axes, plan: dict[str, Any]) -> None:
    backups = plan["backups"]
    axes.plot(backups, plan["mean"], color="#0072B2", marker="o", markersize=3, label="seconds per update")
    if None not in plan["low"] and None not in plan["high"]:
        axes.fill_between(backups, plan["low"], plan["high"], color="#0072B2", alpha=0.2, linewidth=0)
    axes.set(xlabel=f"backups of {plan['machines']} machines", ylabel="seconds per update")
    if any(value is not None for value in plan["time"]):
        other = axes.twinx()
        best = min(value for value in plan["time"] if value is not None)
        times = [float("nan") if value is None else value / best for value in plan["time"]]
        other.plot(backups, times, color="#009E73", marker="s", markersize=3, label="time to the target")
        other.set_ylabel("time to the target, over the best")
        other.grid(visible=False)
    choice = plan["choice"]
    if choice is not None and choice["backups"] is not None:
        axes.axvline(choice["backups"], color="#D55E00", linestyle=(0, (1, 2)))
        axes.annotate(f" {choice['quorum']}+{choice['backups']}", (choice["backups"], axes.get_ylim()[1]), va="top")
    axes.figure.legend(frameon=False, loc="outside lower center", ncols=2)


# ---------------------------------------------------------------- figures with one panel per run


def _cdf(axes: Axes, run: dict[str, Any]) -> None:
    from matplotlib import colormaps

    axes.set_title(_plain(run["label"]), loc="left")
    chosen = run["arrivals"]["chosen"]
    for place, one in enumerate(chosen):
        colour = colormaps["viridis"](0.9 * place / max(1, len(chosen) - 1))
        axes.plot(one["seconds"], one["share"], color=colour, label=f"k = {one['k']}", linewidth=1.4)
    axes.set_xlim(0, 1.05 * max(one["seconds"][-3] for one in chosen))
    axes.set(xlabel=_seconds(run), ylabel="share of rounds")
    axes.legend(frameon=False, fontsize=8, ncols=2)


def _workers(axes: Axes, run: dict[str, Any]) -> None:
    axes.set_title(_plain(run["label"]), loc="left")
    rows = [row for row in run["worker_rows"] if row["slowness"] is not None][:_MOST_BARS]
    axes.bar(range(len(rows)), [row["slowness"] for row in rows], color=run["colour"])
    axes.set_xticks(range(len(rows)), [str(row["worker"]) for row in rows], fontsize=7)
    axes.axhline(1, color="#555555", linewidth=0.8)
    axes.set(xlabel=f"worker, slowest first (at most {_MOST_BARS})", ylabel="slowness")


def _timeline(axes: Axes, run: dict[str, Any]) -> None:
    import numpy
    from matplotlib.colors import to_rgb

    timeline, outline = run["timeline"], run["timeline"]["outline"]
    kinds, rows, bins = outline["kinds"], timeline["rows"], outline["bins"]
    shares = numpy.frombuffer(shares_of(timeline), dtype=numpy.uint8).reshape(len(kinds), rows, bins) / 255
    colours = numpy.array([to_rgb(KIND_COLOURS[kind]) for kind in kinds])
    picture = numpy.einsum("lrb,lc->rbc", shares, colours)
    picture += numpy.clip(1 - shares.sum(0), 0, 1)[:, :, None] * numpy.array(to_rgb(_WAITING))
    width = bins * outline["width_s"]
    last = rows * timeline["workers_per_row"] - 0.5
    axes.imshow(picture.clip(0, 1), aspect="auto", interpolation="nearest", extent=(0, width, last, -0.5))
    axes.set_xlim(0, timeline["seconds"])
    axes.grid(visible=False)
    axes.set_title(_plain(run["label"]), loc="left")
    axes.set(xlabel=_seconds(run), ylabel="worker")
    for kind in (*kinds, "waiting"):
        axes.plot([], [], "s", color=KIND_COLOURS.get(kind, _WAITING), label=kind)
    axes.legend(frameon=False, fontsize=8, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.2))


_PER_RUN = {"arrivals-cdf": _cdf, "workers": _workers, "timeline": _timeline}


def check_free(folder: Path, names: Sequence[str]) -> None:
    """Refuse to overwrite figures of these names."""
    for name in names:
        for file in (folder / f"{name}.csv", folder / f"{name}.png"):
            if file.exists():
                raise BadInput(f"{str(file)!r} is there already; name another folder, or add --overwrite")


def write_figures(data: dict[str, Any], folder: Path, overwrite: bool) -> list[Path]:
    """Write all figures, and return the files. Existing files are replaced only with `overwrite`."""
    found = list(tables(data))
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not overwrite:
            check_free(folder, [table.name for table in found])
        for table in found:
            numbers, picture = folder / f"{table.name}.csv", folder / f"{table.name}.png"
            with numbers.open("w", encoding="utf-8", newline="") as opened:
                writer = csv.writer(opened, lineterminator="\n")
                writer.writerow(table.columns)
                writer.writerows(table.rows)
            draw(data, table, picture)
            written += [numbers, picture]
    except OSError as error:
        raise BadInput(f"the folder {str(folder)!r} cannot be written: {error.strerror}; name another") from error
    return written
