"""`quorate report`: one page about one run, or several side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quorate.cli.options import KEPT, OUTPUT, option
from quorate.cli.output import print_json
from quorate.errors import BadInput
from quorate.number_format import byte_size

PAGE_FILE = "report.html"
PAGE = "The page"
_MOST_RUNS = 16  # more can be told apart neither by colour nor on a screen


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs, or their traces; a folder of several runs is all of them. Or step times of a "
            "script, as quorate.measure writes them.",
            metavar="RUN|TIMES.csv",
        ),
    ],
    out: Annotated[
        Path | None,
        option(KEPT, "The page.", show_default=f"{PAGE_FILE} in the run's folder, or here", metavar="FILE"),
    ] = None,
    target: Annotated[
        str | None, option(PAGE, "Compare the time to this, e.g. 'accuracy>=0.95'.", metavar="CONDITION")
    ] = None,
    figures: Annotated[
        Path | None, option(KEPT, "Also write each figure as PNG and CSV into this folder.", metavar="FOLDER")
    ] = None,
    tensorboard: Annotated[
        Path | None, option(KEPT, "Also write the curves for TensorBoard into this folder.", metavar="FOLDER")
    ] = None,
    no_plan: Annotated[bool, option(PAGE, "Leave out the planner's part.", "--no-plan")] = False,
    overwrite: Annotated[bool, option(KEPT, "Replace files that are there.", "--overwrite")] = False,
    open_page: Annotated[bool, option(PAGE, "Open the page in a browser.", "--open")] = False,
    json: Annotated[
        bool,
        option(OUTPUT, "Print the data as one JSON object; the page is written if --out is given.", "--json"),
    ] = False,
) -> None:
    """Make a page about a run, or several side by side: who is slow, what was learned, what workers did.

    The page is one file that loads nothing from the network. A torn trace is shown up to its last complete record.
    """
    import webbrowser

    from quorate.reporting.report.data import plan_for, report_data, without_drawings
    from quorate.reporting.report.exports import check_page_free, page_text, write_page
    from quorate.reporting.report.trace_pass import MOST_SEGMENTS, are_tables, find_runs, gather, gather_steps
    from quorate.stopping import parse_until

    tables = are_tables(runs)
    found = runs if tables else find_runs(runs)
    if not tables and len(found) > _MOST_RUNS:
        raise BadInput(f"{len(found)} runs are too many to tell apart; name at most {_MOST_RUNS}")
    missing = [] if tables else [path for path in found if not path.exists()]
    if missing:
        raise BadInput(f"run {str(missing[0])!r} does not exist; check the path")
    goal = None if target is None else parse_until(target)
    file = out if out is not None or json else runs[0].with_suffix(".html") if tables else _default_file(found)
    if file is not None:
        check_page_free(file, overwrite)
        _check_is_no_trace(file, found)
    elif open_page:
        raise BadInput("--open shows the page, but --json writes none; add --out FILE, or leave out one of the two")
    _check_exports(figures, tensorboard, overwrite)

    if tables:
        gathered = [gather_steps(found)]
    else:
        gathered = [gather(path, MOST_SEGMENTS // len(found)) for path in found]
    plan, why_not = (None, None) if no_plan else plan_for(gathered)
    data = report_data(gathered, goal, plan, why_not)
    written: list[str] = []
    if file is not None:
        text = page_text(data)
        write_page(text, file)
        written.append(f"{file}: the report, {byte_size(len(text.encode()))}")
    written += _export(data, figures, tensorboard, overwrite)
    if json:
        print_json(without_drawings(data))
    else:
        for line in written:
            typer.echo(line)
    for run in gathered:
        if run.left_out is not None:
            where = "" if run.left_out.startswith(run.path.name) else f"{run.path}: "
            sys.stderr.write(f"note: {where}{run.left_out}\n")
    if open_page and file is not None and not webbrowser.open(file.resolve().as_uri()):
        sys.stderr.write(f"note: no browser could be opened; open {str(file)!r} yourself\n")


def _default_file(found: list[Path]) -> Path:
    from quorate.reporting.report.data import run_folder

    if len(found) > 1:
        return Path(PAGE_FILE)
    folder = run_folder(found[0])
    return (folder if folder.is_dir() else folder.parent) / PAGE_FILE


def _check_is_no_trace(file: Path, found: list[Path]) -> None:
    """Refuse to overwrite a trace of the report, even with --overwrite."""
    from quorate.trace import trace_file

    for run in found:
        if file.exists() and file.samefile(run if run.is_file() else trace_file(run)):
            raise BadInput(f"out is {str(file)!r}, which is to be shown; name another file for the page")


def _check_exports(figures: Path | None, tensorboard: Path | None, overwrite: bool) -> None:
    """Refuse before the traces are read if the exports could not be written."""
    for name, folder in (("figures", figures), ("tensorboard", tensorboard)):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise BadInput(f"{name} is {str(folder)!r}, which is a file; name a folder")
    if figures is not None:
        from quorate.reporting.figures import check_can_draw
        from quorate.reporting.report.exports import check_free

        check_can_draw()
        if not overwrite:
            check_free(figures, ("timeline",))  # every report has it; the other names are checked once they are known
    if tensorboard is not None:
        from quorate.reporting.report.exports import check_can_export

        check_can_export()


def _export(data: dict[str, Any], figures: Path | None, tensorboard: Path | None, overwrite: bool) -> list[str]:
    lines = []
    if figures is not None:
        from quorate.reporting.report.exports import write_figures

        files = write_figures(data, figures, overwrite)
        lines.append(f"{figures}: {len(files)} files, {', '.join(sorted({file.stem for file in files}))}")
    if tensorboard is not None:
        from quorate.reporting.report.exports import write_events

        names = write_events(data, tensorboard)
        lines.append(f"{tensorboard}: for TensorBoard, {len(names)} {'run' if len(names) == 1 else 'runs'}")
    return lines
