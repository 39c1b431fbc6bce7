"""python -m benchmarks.ray [--quick] [--only rates|memory] [--sizes 0.1M 5M 25M] [--cases a b c] [--json]

Quorate's Ray engine beside the first-N parameter server that Ray's documentation leads to: the same net, batches and
sleeps, 6+2 workers on one machine, each run with a Ray of its own in a process tree of its own. Contenders take turns,
in another order each repeat; figures are medians, ratios are medians of the ratios within a repeat. Then the memory of
the driver, with few and with many parameters. Exit code 1 if a run failed.

a: nobody sleeps · b: 50 ms + Exp(25 ms) · c: 50 ms, 4 % of the time 500 ms
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks.local import workload
from benchmarks.local.isolated import can_isolate
from benchmarks.local.measuring import UPDATES, WARMUP, Setting
from benchmarks.local.turns import MEDIANS, Runs, machine, middle, ratio, say, take_turns, with_own_ray
from benchmarks.ray.tables import show

WORKERS, QUORUM = 8, 6
QUICK_UPDATES = {"0.1M": 50, "5M": 20, "25M": 8}
QUICK_WARMUP = 5
MODULES = {
    "peer": "benchmarks.ray.run_peer",
    "ours": "benchmarks.ray.run_ours",
    "floor": "benchmarks.local.run_floor",
    "local": "benchmarks.local.run_ours",
}
MEMORY_SIZES = ("0.1M", "25M")


def target(size: str, case: str) -> float:
    """At least so many times the peer's updates a second, at no more than its CPU time an update."""
    return {"b": 1.2, "c": 1.5}.get(case, 1.3) if size == "0.1M" else 1.3


class Contender(NamedTuple):
    name: str
    setting: Setting

    @property
    def label(self) -> str:
        return self.name

    def command(self) -> list[str]:
        return [sys.executable, "-m", MODULES[self.name], *self.setting.flags()]


class Cell(NamedTuple):
    """Contenders that take turns."""

    size: str
    case: str
    contenders: list[Contender]


def cells(sizes: list[str], cases: list[str], beside: list[str], quick: bool, updates: int | None) -> Iterator[Cell]:
    for size in sizes:
        measured = updates or (QUICK_UPDATES if quick else UPDATES)[size]
        for case in cases:
            setting = Setting(size, case, WORKERS, QUORUM, measured, QUICK_WARMUP if quick else WARMUP)
            yield Cell(size, case, [Contender(name, setting) for name in ("peer", "ours", *beside)])


# ---------------------------------------------------------------- running


def measure(cell: Cell, repeats: int, timeout_s: float) -> Runs:
    """The rows of a cell, one a contender."""
    runs: dict[Contender, Runs] = {contender: [] for contender in cell.contenders}
    for repeat in range(repeats):
        say(f"{cell.size} parameters, case {cell.case}, repeat {repeat + 1} of {repeats}")
        for contender, found in take_turns(cell.contenders, repeat, partial(with_own_ray, timeout_s=timeout_s)).items():
            runs[contender].append(found)
    return [row(cell, contender, runs) for contender in cell.contenders]


def memory(timeout_s: float) -> Runs:
    """The driver's peak memory without and with an `out` folder, for each size."""
    found = []
    for folder in (False, True):
        for size in MEMORY_SIZES:
            command = [sys.executable, "-m", "benchmarks.ray.run_memory", f"--size={size}", *["--folder"] * folder]
            run = with_own_ray(command, timeout_s)
            found.append({"size": size, "folder": folder, **run})
            more = "with checkpoints" if folder else "without a folder"
            say(f"memory: {size} {more}: {run.get('failed') or '%.1f MB' % (run['resident_bytes'] / 1e6)}")
    return found


# ---------------------------------------------------------------- figures


def row(cell: Cell, contender: Contender, runs: dict[Contender, Runs]) -> dict[str, Any]:
    """A contender's medians, and its ratios to the peer."""
    name, setting = contender
    mine, peer = runs[contender], runs[cell.contenders[0]]
    medians = {figure: middle(mine, figure) for figure in MEDIANS}
    rate = medians["updates_per_s"]
    limit = workload.most_updates_per_s(cell.case, setting.workers, setting.quorum, setting.warmup, setting.steps)
    return {
        "contender": name,
        "label": contender.label,
        **vars(setting),
        **medians,
        "cpu_ms_by_role": by_role(mine),
        "over_peer": ratio(mine, peer, "updates_per_s"),
        "cpu_over_peer": ratio(mine, peer, "cpu_ms_per_update"),
        "target": target(cell.size, cell.case) if name == "ours" else None,
        "limit_updates_per_s": limit,
        "of_limit": None if rate is None or limit is None else rate / limit,
        "runs": mine,
    }


def by_role(runs: Runs) -> dict[str, float]:
    """CPU milliseconds an update takes in each role, largest first; medians."""
    found = [run["cpu_ms_by_role"] for run in runs if "cpu_ms_by_role" in run]
    roles = {role for one in found for role in one}
    medians = {role: middle([{"cpu_ms": one.get(role, 0.0)} for one in found], "cpu_ms") or 0.0 for role in roles}
    return dict(sorted(medians.items(), key=lambda item: -item[1]))


def main() -> int:
    parser = argparse.ArgumentParser(
        "benchmarks.ray", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="minutes instead of an hour, 0.1M unless --sizes; noisier")
    parser.add_argument("--sizes", nargs="+", choices=workload.WIDTHS, metavar="SIZE", help="0.1M, 5M, 25M")
    parser.add_argument("--cases", nargs="+", choices=workload.CASES, default=list(workload.CASES), metavar="CASE")
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of each contender (default 5; 1 with --quick)")
    parser.add_argument("--updates", type=int, metavar="N", help="measured in a run, after warm-up (default by size)")
    parser.add_argument(
        "--beside",
        nargs="+",
        choices=["floor", "local"],
        default=[],
        metavar="WHO",
        help="floor, local: more contenders",
    )
    parser.add_argument("--only", choices=["rates", "memory"], help="one part instead of both")
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="seconds a run may take (default 900)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of tables")
    given = parser.parse_args()
    repeats = (1 if given.quick else 5) if given.repeats is None else given.repeats
    if repeats < 1 or (given.updates is not None and given.updates < 2):
        parser.error("--repeats must be at least 1 and --updates at least 2")
    if find_spec("ray") is None:
        parser.error("Ray is not installed: pip install '.[ray]'")
    sizes = given.sizes or (["0.1M"] if given.quick else list(workload.WIDTHS))
    if not can_isolate():
        say("Not root, or no unshare and ip: contenders run without namespaces of their own.")
    rows: Runs = []
    if given.only != "memory":
        for cell in cells(sizes, given.cases, given.beside, given.quick, given.updates):
            rows += measure(cell, repeats, given.timeout)
    drivers = memory(given.timeout) if given.only != "rates" else []
    report = {
        "machine": {**machine(), "ray": version("ray")},
        "repeats": repeats,
        "rows": rows,
        "memory": drivers,
    }
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return int(any("failed" in run for run in (*drivers, *(run for row in rows for run in row["runs"]))))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
