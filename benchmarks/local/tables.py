"""The report of `benchmarks.local` for people: a table a size and case, drawn by rich where it is installed."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from benchmarks.local.workload import CASES

NOISY_CORES = 0.2

Row = dict[str, Any]


def show(report: dict[str, Any]) -> None:
    tell_machine(report)
    for (section, size, case), group in groupby(report["rows"], lambda row: (row["section"], row["size"], row["case"])):
        title = f"{section}: {size} parameters, {CASES[case]}"
        rows = list(group)
        columns = _COLUMNS["stragglers" if section == "stragglers" else "a"]
        if section == "scaling":
            columns = {name: how for name, how in columns.items() if "DDP" not in name}
        draw(title, list(columns), [[how(row) for how in columns.values()] for row in rows])
        for row in rows:
            _notes(row)
        warn_of_noise(rows)


def tell_machine(report: dict[str, Any]) -> None:
    machine = report["machine"]
    apart = "in namespaces of its own" if machine["isolated"] else "without namespaces of its own"
    print(
        f"{machine['cores']} cores, torch {machine['torch']}, Python {machine['python']}, quorate {machine['quorate']};"
        f" medians of {report['repeats']}, each run {apart}"
    )


def warn_of_noise(rows: list[Row]) -> None:
    noisiest = max(row["noise_cores"] or 0.0 for row in rows)
    if noisiest > NOISY_CORES:
        print(f"Other programs took up to {noisiest:.2f} cores: repeat on a quiet machine.")


def _notes(row: Row) -> None:
    if row["bandwidth_share"] is not None:
        print(
            f"{row['label']}: {100 * row['bandwidth_share']:.0f} % of the memory bandwidth "
            f"({row['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s read and written)"
        )
    tell_failures(row)


def tell_failures(row: Row) -> None:
    failures = [run["failed"] for run in row["runs"] if "failed" in run]
    if failures:
        print(f"{row['label']}: {len(failures)} of {len(row['runs'])} runs failed; the last: {failures[-1]}")


def number(name: str, digits: int, unit: str = "") -> Any:
    return lambda row: "–" if row[name] is None else f"{row[name]:,.{digits}f}{unit}"


_START = {"": lambda row: row["label"], "updates/s": number("updates_per_s", 2)}
_RATIOS = {"over DDP": number("over_ddp", 2, "×"), "over floor": number("over_floor", 2, "×")}
_LIMIT = {"limit": number("limit_updates_per_s", 2), "of the limit": number("of_limit", 2)}
_END = {
    "samples/s": number("samples_per_s", 0),
    "CPU ms/update": number("cpu_ms_per_update", 1),
    "CPU over DDP": number("cpu_over_ddp", 2, "×"),
    "CPU over floor": number("cpu_over_floor", 2, "×"),
    "p99 ms": number("update_ms_p99", 1),
    "noise, cores": number("noise_cores", 2),
}
_COLUMNS: dict[str, dict[str, Any]] = {
    "a": {**_START, **_RATIOS, **_END},
    "stragglers": {**_START, **_RATIOS, **_LIMIT, **_END},
}


def draw(title: str, columns: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        print(f"\n{title}")
        for line in (columns, *rows):
            print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    wide = Console()
    if not wide.is_terminal:
        wide = Console(width=160)
    wide.print(table)
