"""The report of `benchmarks.network` for people: a table a net and ratio, and the floors that were missed."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from benchmarks.local.tables import draw
from benchmarks.network.sweep import NOISY_CORES, Row, told, verdict

_COLUMNS = ["", "iterations/s", "ms", "over blocking", "over DDP", "of the limit", "CPU ms", "noise", "floors"]


def show(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(
        f"{report['hosts']} hosts on {machine['cores']} cores, pinned: {report['pinned']}; torch {machine['torch']}, "
        f"Python {machine['python']}; medians of {report['repeats']} repeats of {report['iterations']} iterations"
    )
    if report["elsewhere"]:
        print("Layers sleep instead of computing, as where each host has an accelerator of its own.")
    for (net, ratio), group in groupby(report["rows"], lambda row: (row["net"], row["ratio"])):
        rows = list(group)
        draw(_title(net, ratio, rows[0]), _COLUMNS, [_cells(row) for row in rows])
        for row in rows:
            if row["missed"]:
                print(f"{row['label']} misses: {'; '.join(row['missed'])}")
            _tell_failures(row)
        noisiest = max(row["noise_cores"] or 0.0 for row in rows)
        if noisiest > NOISY_CORES:
            print(f"Other programs took up to {noisiest:.2f} cores: repeat on a quiet machine.")


def _title(net: str, ratio: float | None, row: Row) -> str:
    title = f"{net}, communication {told(ratio)}"
    if row["ratio_measured"] is not None:
        title += f" (measured {row['ratio_measured']:.2f})"
    if row["rate_bits_per_s"] is None:
        return title if ratio is None else f"{title}: not slower than that without a limit"
    used = f"{100 * row['rate_achieved']:.0f} % of it used by the all-reduce alone"
    return f"{title}: {row['rate_bits_per_s'] / 1e6:.0f} Mbit/s a link, {used}"


def _cells(row: Row) -> list[str]:
    over = row["over"]
    is_bound = row["contender"] in ("none", "comm")
    return [
        row["label"],
        _number(row["iterations_per_s"], 2),
        _number(None if row["iteration_s"] is None else 1e3 * row["iteration_s"], 0),
        _number(over["blocking"], 2, "×"),
        _number(over["ddp"], 2, "×"),
        "" if is_bound else _number(over["limit"], 2),
        _number(row["cpu_ms_per_iteration"], 0),
        _number(row["noise_cores"], 2),
        "" if row["missed"] is None else verdict(not row["missed"], row["disturbed"]),
    ]


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.{digits}f}{unit}"


def _tell_failures(row: Row) -> None:
    failures = [run["failed"] for run in row["runs"] if "failed" in run]
    if failures:
        print(f"{row['label']}: {len(failures)} of {len(row['runs'])} runs failed; the last: {failures[-1]}")
