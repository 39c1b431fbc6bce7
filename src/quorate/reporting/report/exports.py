"""The files that a report makes: the page, and the figures, tables and TensorBoard events beside it.

The page is one HTML file that contains its data, styles and scripts, and loads nothing from the network.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quorate.errors import BadInput, install_line
from quorate.reporting.figures import STYLE, MissingLibrary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


#: Identifies a report, which may be overwritten without asking.
MARK = '<meta name="generator" content="quorate report">'
_SCRIPTS = (
    "uPlot.iife.min.js",
    "elements.js",
    *(f"report/{name}.js" for name in ("words", "charts", "timeline", "page")),
)
_STYLES = ("uPlot.min.css", "report/page.css")


def page_text(data: dict[str, Any]) -> str:
    """The whole page. Text from traces is data: it is never part of the markup or of a script.

    The content security policy only runs the script with this digest, so even text that escaped could not run.
    """
    script = "\n".join(map(_asset, _SCRIPTS))
    assert "</script" not in script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return _filled(
        _asset("report/page.html"),
        {
            "MARK": MARK,
            "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
            "TITLE": html.escape(f"{data['title']} · quorate report"),
            "STYLE": "\n".join(map(_asset, _STYLES)),
            "DATA": json_for_script(data),
            "SCRIPT": script,
        },
    )


def json_for_script(data: dict[str, Any]) -> str:
    """JSON for a script element: escaped so that no text in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _filled(template: str, parts: dict[str, str]) -> str:
    """Fill in the template in one pass, so that placeholders in the parts are not replaced."""
    pieces = template.split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (files("quorate.reporting") / "assets" / name).read_text(encoding="utf-8")


def check_page_free(file: Path, overwrite: bool) -> None:
    """Refuse to overwrite a file that is no report; called before the traces are read."""
    if file.is_dir():
        raise BadInput(f"out is {str(file)!r}, which is a folder; name a file, e.g. {str(file / 'report.html')!r}")
    if not file.parent.is_dir():
        raise BadInput(f"out is {str(file)!r}, but the folder {str(file.parent)!r} does not exist; make it first")
    if file.exists() and not overwrite and not _is_ours(file):
        raise BadInput(f"out is {str(file)!r}, which exists and is no report; name another file, or add --overwrite")


def _is_ours(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return MARK in opened.read(2000)
    except OSError:
        return False


def write_page(text: str, file: Path) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"report {str(file)!r} cannot be written: {error.strerror}; name another with --out") from error


# ---------------------------------------------------------------- the page


Run = dict[str, Any]  # an entry of "runs" in the data of a report

#: The same colours as in the timeline of the page.
KIND_COLOURS = {"used": "#009e73", "dropped": "#e69f00", "cancelled": "#f3cf85", "lost": "#d55e00", "gone": "#4a4f57"}
_WAITING = "#e8ebef"
_MOST_BARS = 30

_BYTES = ("sent", "used", "wasted")
_PART_COLUMNS = {"data": "data_s", "compute": "compute_part_s", "transfer": "transfer_s"}
_WORKER_COLUMNS = (
    *("worker", "slowness", "median_s", "at_least_s", "p90_s", "data_s", "compute_part_s", "transfer_s", "slow_in"),
    *("arrived", "applied", "dropped", "lost", "compute_s", "wasted_s", "idle_s", "live_s"),
)


class ExportedFigure(NamedTuple):
    """The numbers of one figure, and how its panels are drawn."""

    name: str  # of its files
    title: str
    columns: tuple[str, ...]
    rows: Iterable[tuple[Any, ...]]
    panels: Sequence[Callable[[Axes], None]]


def exported_figures(data: dict[str, Any]) -> Iterator[ExportedFigure]:
    """Every figure of a report; figures without data are left out."""
    runs = data["runs"]
    columns: tuple[str, ...]
    taken: list[str] = []
    for name in dict.fromkeys(name for run in runs for name in run["measures"]):
        curves = [(run, run["measures"][name]) for run in runs if name in run["measures"]]
        taken.append(slug(name).lower())
        again = f"-{taken.count(taken[-1])}" if taken.count(taken[-1]) > 1 else ""  # "a/b" and "a:b" are both a-b
        yield _curves_figure(f"measure-{slug(name)}{again}", name, curves)
    losses = [(run, run["loss"]) for run in runs if run["loss"] is not None]
    if losses:
        yield _curves_figure("loss", "training loss", losses)
    timed = [run for run in runs if run["arrivals"] is not None]
    if timed:
        columns = ("run", "k", "seconds", "share")
        panels = [partial(_draw_cdf, run=run) for run in timed]
        yield ExportedFigure("arrivals-cdf", "time to the k-th gradient", columns, _cdf_rows(timed), panels)
        columns = ("run", "k", "mean_s", "rounds")
        panels = [partial(_draw_means, runs=timed)]
        yield ExportedFigure("arrivals-mean", "mean time to the k-th gradient", columns, _mean_rows(timed), panels)
    shares = ("run", "first_worker", "from_s", "to_s", *runs[0]["timeline"]["outline"]["kinds"], "waiting")
    panels = [partial(_draw_timeline, run=run) for run in runs]
    yield ExportedFigure("timeline", "what the workers did: shares of their time", shares, _timeline_rows(runs), panels)
    panels = [partial(_draw_workers, run=run) for run in runs]
    columns = ("run", *_WORKER_COLUMNS)
    yield ExportedFigure("workers", "the workers, slowest first", columns, _worker_rows(runs), panels)
    if any(run["summary"]["staleness"]["max"] for run in runs):
        columns = ("run", "least", "most", "tickets")
        bars = ((run["label"], bar["least"], bar["most"], bar["tickets"]) for run in runs for bar in run["staleness"])
        panels = [partial(_draw_staleness, runs=runs)]
        yield ExportedFigure("staleness", "applied gradients by staleness", columns, bars, panels)
    if any(run["summary"]["bytes"]["sent"] for run in runs):
        columns = ("run", *(f"{name}_bytes" for name in _BYTES))
        sizes = ((run["label"], *(run["summary"]["bytes"][name] for name in _BYTES)) for run in runs)
        yield ExportedFigure("bytes", "bytes sent", columns, sizes, [partial(_draw_bytes, runs=runs)])
    choosing = [run for run in runs if run["choices"]]
    if choosing:
        names = ("time", "version", "quorum", "reason")
        changes = ((run["label"], change) for run in choosing for change in run["choices"]["changes"])
        rows = ((label, *(change[name] for name in names)) for label, change in changes)
        panels = [partial(_draw_choices, runs=choosing)]
        yield ExportedFigure("choices", "the quorum that was chosen", ("run", "time_s", *names[1:]), rows, panels)
    plan = data["plan"]
    if plan is not None and not (plan["choice"] or {}).get("is_kept"):  # kept: no other split can be judged
        splits = ("backups", "quorum", "mean", "low", "high", "median", "p99", "updates", "time", "wasted", "bytes")
        numbers = zip(*(plan[name] for name in splits), strict=True)
        yield ExportedFigure("plan", "the planner's curve", splits, numbers, [partial(_draw_plan, plan=plan)])


def slug(name: str) -> str:
    """A file name that is valid on any file system and cannot leave its folder."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:60] or "unnamed"


# ---------------------------------------------------------------- files


def check_free(folder: Path, names: Sequence[str]) -> None:
    """Refuse to overwrite figures of these names."""
    for name in names:
        for file in (folder / f"{name}.csv", folder / f"{name}.png"):
            if file.exists():
                raise BadInput(f"{str(file)!r} is there already; name another folder, or add --overwrite")


def write_figures(data: dict[str, Any], folder: Path, overwrite: bool) -> list[Path]:
    """Write all figures, and return the files. Existing files are replaced only with `overwrite`."""
    found = list(exported_figures(data))
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not overwrite:
            check_free(folder, [one.name for one in found])
        for one in found:
            numbers, picture = folder / f"{one.name}.csv", folder / f"{one.name}.png"
            with numbers.open("w", encoding="utf-8", newline="") as opened:
                writer = csv.writer(opened, lineterminator="\n")
                writer.writerow(one.columns)
                writer.writerows(one.rows)
            _draw(one, picture)
            written += [numbers, picture]
    except OSError as error:
        raise BadInput(f"the folder {str(folder)!r} cannot be written: {error.strerror}; name another") from error
    return written


def _draw(one: ExportedFigure, file: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6 + 2.6 * (len(one.panels) - 1)), dpi=160, layout="constrained")
        for axes, draw in zip(figure.subplots(len(one.panels), 1, squeeze=False)[:, 0], one.panels, strict=True):
            draw(axes)
        figure.suptitle(_plain(one.title), fontsize=10.5)
        figure.savefig(file)


# ---------------------------------------------------------------- numbers


def _cdf_rows(runs: list[Run]) -> Iterator[tuple[Any, ...]]:
    for run in runs:
        for chosen in run["arrivals"]["chosen"]:
            for seconds, share in zip(chosen["seconds"], chosen["share"], strict=True):
                yield run["label"], chosen["k"], seconds, share


def _mean_rows(runs: list[Run]) -> Iterator[tuple[Any, ...]]:
    for run in runs:
        arrivals = run["arrivals"]
        for place, (mean, count) in enumerate(zip(arrivals["means"], arrivals["counts"], strict=True), start=1):
            yield run["label"], place, mean, count


def _timeline_rows(runs: list[Run]) -> Iterator[tuple[Any, ...]]:
    for run in runs:
        timeline, outline = run["timeline"], run["timeline"]["outline"]
        packed, bins, rows = _shares(timeline), outline["bins"], timeline["rows"]
        for row in range(rows):
            for index in range(bins):
                parts = [packed[(kind * rows + row) * bins + index] / 255 for kind in range(len(outline["kinds"]))]
                times = index * outline["width_s"], min((index + 1) * outline["width_s"], timeline["seconds"])
                rest = max(0.0, 1 - sum(parts))
                shown = [round(part, 4) for part in (*parts, rest)]
                yield run["label"], row * timeline["workers_per_row"], *times, *shown


def _shares(timeline: dict[str, Any]) -> bytes:
    """The packed outline: kind by kind, row by row, bin by bin, in 255ths."""
    return base64.b64decode(timeline["outline"]["shares"])


def _worker_rows(runs: list[Run]) -> Iterator[tuple[Any, ...]]:
    for run in runs:
        for row in run["worker_rows"]:
            parts = row["parts_s"] or {}
            named = {_PART_COLUMNS.get(part, part): part_s for part, part_s in parts.items()} | row
            yield run["label"], *(named.get(name) for name in _WORKER_COLUMNS)


# ---------------------------------------------------------------- pictures


def _plain(text: str) -> str:
    """Escape text from a trace for matplotlib: `$` starts a formula, and a leading underscore hides a label."""
    return text.replace("$", r"\$").lstrip("_") or "unnamed"


def _look(run: Run) -> dict[str, Any]:
    line = (0, (4, 1.5)) if run["dashed"] else "-"
    return {"color": run["colour"], "linestyle": line, "label": _plain(run["label"]), "linewidth": 1.4}


def _seconds(run: Run) -> str:
    return "virtual seconds" if run["seconds_are"] == "virtual" else "seconds"


def _curves_figure(name: str, title: str, curves: list[tuple[Run, dict[str, list[Any]]]]) -> ExportedFigure:
    columns = ("time", "updates", "samples", "value")
    rows = (
        (run["label"], *point) for run, curve in curves for point in zip(*(curve[key] for key in columns), strict=True)
    )
    return ExportedFigure(name, title, ("run", "time_s", *columns[1:]), rows, [partial(_draw_curves, curves=curves)])


def _draw_curves(axes: Axes, curves: list[tuple[Run, dict[str, list[Any]]]]) -> None:
    for run, curve in curves:
        values = [float("nan") if value is None else value for value in curve["value"]]
        axes.plot(curve["time"], values, **_look(run))
    axes.set_xlabel(_seconds(curves[0][0]))
    axes.legend(frameon=False)


def _draw_cdf(axes: Axes, run: Run) -> None:
    from matplotlib import colormaps

    axes.set_title(_plain(run["label"]), loc="left")
    chosen = run["arrivals"]["chosen"]
    for place, one in enumerate(chosen):
        colour = colormaps["viridis"](0.9 * place / max(1, len(chosen) - 1))
        axes.plot(one["seconds"], one["share"], color=colour, label=f"k = {one['k']}", linewidth=1.4)
    axes.set_xlim(0, 1.05 * max(one["seconds"][-3] for one in chosen))
    axes.set(xlabel=_seconds(run), ylabel="share of rounds")
    axes.legend(frameon=False, fontsize=8, ncols=2)


def _draw_means(axes: Axes, runs: list[Run]) -> None:
    for run in runs:
        means = run["arrivals"]["means"]
        axes.plot(range(1, len(means) + 1), means, **_look(run))
    axes.set(xlabel="k", ylabel=_seconds(runs[0]), ylim=(0, None))
    axes.legend(frameon=False)


def _draw_timeline(axes: Axes, run: Run) -> None:
    import numpy
    from matplotlib.colors import to_rgb

    timeline, outline = run["timeline"], run["timeline"]["outline"]
    kinds, rows, bins = outline["kinds"], timeline["rows"], outline["bins"]
    shares = numpy.frombuffer(_shares(timeline), dtype=numpy.uint8).reshape(len(kinds), rows, bins) / 255
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


def _draw_workers(axes: Axes, run: Run) -> None:
    axes.set_title(_plain(run["label"]), loc="left")
    rows = [row for row in run["worker_rows"] if row["slowness"] is not None][:_MOST_BARS]
    axes.bar(range(len(rows)), [row["slowness"] for row in rows], color=run["colour"])
    axes.set_xticks(range(len(rows)), [str(row["worker"]) for row in rows], fontsize=7)
    axes.axhline(1, color="#555555", linewidth=0.8)
    axes.set(xlabel=f"worker, slowest first (at most {_MOST_BARS})", ylabel="slowness")


def _draw_staleness(axes: Axes, runs: list[Run]) -> None:
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


def _draw_bytes(axes: Axes, runs: list[Run]) -> None:
    sizes = [run["summary"]["bytes"] for run in runs]
    places = range(len(runs))
    used, wasted = ([size[name] / 1e6 for size in sizes] for name in ("used", "wasted"))
    axes.barh(places, used, color=KIND_COLOURS["used"], label="used")
    axes.barh(places, wasted, left=used, color=KIND_COLOURS["dropped"], label="wasted")
    axes.set_yticks(places, [_plain(run["label"]) for run in runs])
    axes.invert_yaxis()
    axes.set_xlabel("MB sent")
    axes.legend(frameon=False)


def _draw_choices(axes: Axes, runs: list[Run]) -> None:
    for run in runs:
        changes = run["choices"]["changes"]
        times = [*(change["time"] for change in changes), run["summary"]["seconds"]]
        quorums = [change["quorum"] for change in changes]
        axes.step(times, [*quorums, quorums[-1]], where="post", **_look(run))
    axes.set(xlabel=_seconds(runs[0]), ylabel="quorum", ylim=(0, None))
    axes.legend(frameon=False)


def _draw_plan(axes: Axes, plan: dict[str, Any]) -> None:
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


# ---------------------------------------------------------------- TensorBoard

_OURS = ".quorate"  # suffix of exported files; only files with it are replaced


def check_can_export() -> None:
    if find_spec("tensorboard") is None:
        raise MissingLibrary(
            f"--tensorboard needs tensorboard, which is not installed; type: {install_line('tensorboard')}"
        )


def write_events(data: dict[str, Any], folder: Path) -> list[str]:
    """Write loss, measures and chosen quorums by version, with the run's seconds as wall time; returns the folders."""
    check_can_export()
    names: list[str] = []
    for run in data["runs"]:
        name = slug(run["label"])
        while name in names:
            name += "-again"
        names.append(name)
        try:
            _write_run(run, folder / name)
        except OSError as error:
            raise BadInput(f"the folder {str(folder)!r} cannot be written: {error.strerror}; name another") from error
    return names


def _write_run(run: Run, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports emit warnings
        from torch.utils.tensorboard.writer import SummaryWriter
    for old in folder.glob(f"events.out.tfevents.*{_OURS}"):
        old.unlink()
    curves = {f"measures/{name}": curve for name, curve in run["measures"].items()}
    if run["loss"] is not None:
        curves["loss"] = run["loss"]
    with SummaryWriter(str(folder), filename_suffix=_OURS) as writer:
        for tag, curve in curves.items():
            for time, version, value in zip(curve["time"], curve["updates"], curve["value"], strict=True):
                if value is not None:
                    writer.add_scalar(tag, value, version, walltime=time)
        if run["choices"]:
            for change in run["choices"]["changes"]:
                writer.add_scalar("quorum", change["quorum"], change["version"], walltime=change["time"])
