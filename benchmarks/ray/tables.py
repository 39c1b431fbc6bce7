"""The report of `benchmarks.ray` for people."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from benchmarks.local.tables import Row, draw, number, tell_failures, tell_machine, warn_of_noise
from benchmarks.local.workload import CASES

DRIVER_TARGET_BYTES = 50_000_000


def show(report: dict[str, Any]) -> None:
    tell_machine(report)
    print(f"Ray {report['machine']['ray']}, 6+2 workers on this machine")
    for (size, case), group in groupby(report["rows"], lambda row: (row["size"], row["case"])):
        rows = list(group)
        cells = [[how(row) for how in _COLUMNS.values()] for row in rows]
        draw(f"{size} parameters, {CASES[case]}", list(_COLUMNS), cells)
        for row in rows:
            _where_cpu_goes(row)
            tell_failures(row)
        warn_of_noise(rows)
    if report["memory"]:
        _show_memory(report["memory"])


_COLUMNS = {
    "": lambda row: row["label"],
    "updates/s": number("updates_per_s", 2),
    "over peer": number("over_peer", 2, "×"),
    "target": number("target", 1, "×"),
    "CPU ms/update": number("cpu_ms_per_update", 1),
    "CPU over peer": number("cpu_over_peer", 2, "×"),
    "limit": number("limit_updates_per_s", 2),
    "of the limit": number("of_limit", 2),
    "p99 ms": number("update_ms_p99", 1),
    "noise, cores": number("noise_cores", 2),
}


def _where_cpu_goes(row: Row) -> None:
    parts = [f"{role} {cpu_ms:.1f}" for role, cpu_ms in row["cpu_ms_by_role"].items() if cpu_ms >= 0.05]
    if parts:
        print(f"{row['label']}: CPU ms an update in {', '.join(parts)}")


def _show_memory(runs: list[Row]) -> None:
    kinds = {"peak resident": "resident_bytes", "private": "private_bytes", "shared": "shared_bytes"}
    cells = []
    for folder in (False, True):
        small, large = (run for run in runs if run["folder"] is folder)
        for run in (small, large):
            what = f"{run['size']}, {'checkpoints in a folder' if folder else 'no folder'}"
            megabytes = [f"{run[kind] / 1e6:,.1f}" if kind in run else "–" for kind in kinds.values()]
            more = "–"
            if run is large and "resident_bytes" in small and "resident_bytes" in large:
                more = f"{(large['resident_bytes'] - small['resident_bytes']) / 1e6:+.1f}"
            cells.append([what, *megabytes, more, f"{run['data_bytes'] / 1e6:.1f}" if "data_bytes" in run else "–"])
    columns = ["driver's memory, MB", *kinds, "more than 0.1M", "training data"]
    draw(f"The driver during quorate.train (at most {DRIVER_TARGET_BYTES / 1e6:.0f} MB more)", columns, cells)
    for run in runs:
        if "failed" in run:
            print(f"{run['size']}: failed: {run['failed']}")
