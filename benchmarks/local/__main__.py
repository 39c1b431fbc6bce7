"""python -m benchmarks.local [--quick] [--only a|stragglers|scaling] [--sizes 0.1M 5M 25M] [--json]

Quorate's Local engine beside PyTorch DDP (gloo) and beside the floor, which communicates nothing: the same net,
batches and sleeps, each run in a process tree of its own. Contenders take turns, in another order each repeat;
figures are medians, ratios are medians of the ratios within a repeat. Exit code 1 if a contender failed.

a: nobody sleeps · stragglers: b and c, with and without backup workers · scaling: a, with 2 to 32 workers
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.local import workload
from benchmarks.local.bandwidth import bytes_per_update
from benchmarks.local.isolated import can_isolate
from benchmarks.local.measuring import UPDATES, WARMUP, Setting
from benchmarks.local.tables import show
from benchmarks.local.turns import MEDIANS, Runs, machine, middle, one_run, ratio, say, take_turns

SECTIONS = ("a", "stragglers", "scaling")
QUICK_UPDATES = {"0.1M": 50, "5M": 15, "25M": 5}
QUICK_WARMUP = 3


class Contender(NamedTuple):
    name: str  # "ddp", "floor" or "ours"
    setting: Setting

    @property
    def label(self) -> str:
        workers, quorum = self.setting.workers, self.setting.quorum
        return f"{self.name} {workers}" if quorum == workers else f"{self.name} {quorum}+{workers - quorum}"

    def command(self) -> list[str]:
        python = [sys.executable, "-m"]
        if self.name == "ddp":
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            python += [
                "torch.distributed.run",
                f"--nproc-per-node={self.setting.workers}",
                f"--master-port={port}",
                "-m",
            ]
        return [*python, f"benchmarks.local.run_{self.name}", *self.setting.flags()]


class Cell(NamedTuple):
    """Contenders that take turns."""

    section: str
    size: str
    case: str
    contenders: list[Contender]


def cells(sections: list[str], sizes: list[str], quick: bool, updates: int | None) -> Iterator[Cell]:
    def cell(section: str, size: str, case: str, *who: tuple[str, int, int]) -> Cell:
        measured = updates or (QUICK_UPDATES if quick else UPDATES)[size]
        warmup = QUICK_WARMUP if quick else WARMUP
        contenders = [
            Contender(name, Setting(size, case, workers, quorum, measured, warmup)) for name, workers, quorum in who
        ]
        return Cell(section, size, case, contenders)

    smaller = [size for size in sizes if size != "25M"]  # there the cores set the pace, not the sleeps
    if "a" in sections:
        for size in sizes:
            for n in (8,) if quick else (8, 4):
                yield cell("a", size, "a", ("ddp", n, n), ("floor", n, n), ("ours", n, n))
    if "stragglers" in sections:
        everyone = ("ddp", 8, 8), ("floor", 8, 8), ("ours", 8, 8)
        for size in smaller:
            for case in ("b", "c"):
                yield cell("stragglers", size, case, *everyone, ("floor", 8, 6), ("ours", 8, 6))
    if "scaling" in sections:
        for size in smaller:
            for n in (2, 8, 32) if quick else (2, 4, 8, 16, 32):
                yield cell("scaling", size, "a", ("floor", n, n), ("ours", n, n))


# ---------------------------------------------------------------- running


def measure(cell: Cell, repeats: int, timeout_s: float) -> Runs:
    """The rows of a cell, one a contender."""
    contenders = cell.contenders
    runs: dict[Contender, Runs] = {contender: [] for contender in contenders}
    bandwidths: Runs = []
    for repeat in range(repeats):
        say(f"{cell.section}: {cell.size} parameters, case {cell.case}, repeat {repeat + 1} of {repeats}")
        if cell.size == "25M":
            bandwidths.append(one_run([sys.executable, "-m", "benchmarks.local.bandwidth"], timeout_s))
        for contender, found in take_turns(contenders, repeat, lambda command: one_run(command, timeout_s)).items():
            runs[contender].append(found)
    bandwidth = middle(bandwidths, "bytes_per_s")
    return [row(cell, contender, runs, bandwidth) for contender in contenders]


# ---------------------------------------------------------------- figures


def row(cell: Cell, contender: Contender, runs: dict[Contender, Runs], bandwidth: float | None) -> dict[str, Any]:
    """A contender's medians, and its ratios to DDP with all workers and to the floor with the same quorum."""
    name, setting = contender
    workers, quorum = setting.workers, setting.quorum
    mine = runs[contender]
    others = {(other.name, other.setting.quorum): its for other, its in runs.items()}
    ddp, floor = others.get(("ddp", workers), []), others.get(("floor", quorum), [])
    medians = {figure: middle(mine, figure) for figure in MEDIANS}
    rate = medians["updates_per_s"]
    limit = workload.most_updates_per_s(cell.case, workers, quorum, setting.warmup, setting.steps)
    moved = bytes_per_update(workload.parameter_bytes(cell.size), workers)
    share = rate * moved / bandwidth if rate is not None and bandwidth is not None and name == "ours" else None
    return {
        "section": cell.section,
        "contender": name,
        "label": contender.label,
        **vars(setting),
        **medians,
        "over_ddp": ratio(mine, ddp, "updates_per_s"),
        "over_floor": ratio(mine, floor, "updates_per_s"),
        "cpu_over_ddp": ratio(mine, ddp, "cpu_ms_per_update"),
        "cpu_over_floor": ratio(mine, floor, "cpu_ms_per_update"),
        "limit_updates_per_s": limit,
        "of_limit": None if rate is None or limit is None else rate / limit,
        "bandwidth_bytes_per_s": bandwidth,
        "bandwidth_share": share,
        "runs": mine,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        "benchmarks.local", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="minutes instead of hours, 0.1M unless --sizes; noisier")
    parser.add_argument("--only", choices=SECTIONS, help="one part instead of all three")
    parser.add_argument("--sizes", nargs="+", choices=workload.WIDTHS, metavar="SIZE", help="0.1M, 5M, 25M")
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of each contender (default 5; 1 with --quick)")
    parser.add_argument("--updates", type=int, metavar="N", help="measured in a run, after warm-up (default by size)")
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="seconds a run may take (default 900)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of tables")
    given = parser.parse_args()
    repeats = (1 if given.quick else 5) if given.repeats is None else given.repeats
    if repeats < 1 or (given.updates is not None and given.updates < 2):
        parser.error("--repeats must be at least 1 and --updates at least 2")
    sizes = given.sizes or (["0.1M"] if given.quick else list(workload.WIDTHS))
    plan = list(cells([given.only] if given.only else list(SECTIONS), sizes, given.quick, given.updates))
    if not plan:
        parser.error("stragglers and scaling have no 25M; give --sizes 0.1M or 5M")
    if not can_isolate():
        say("Not root, or no unshare and ip: contenders run without namespaces of their own.")
    rows = [row for cell in plan for row in measure(cell, repeats, given.timeout)]
    report = {"machine": machine(), "repeats": repeats, "rows": rows}
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return int(any("failed" in run for row in rows for run in row["runs"]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
