"""python -m benchmarks.tables [--write]: the benchmarks' tables in benchmarks/README.md and docs.

Those of docs/choosing-b.md are computed; all others come from committed raw figures:

| file | made by |
|---|---|
| local/results.json | python -m benchmarks.local --json |
| network/measurements.json | as runs of python -m benchmarks.network printed them |
| adaptive.json | python -m benchmarks.adaptive --out FILE |
| planning.json | python -m benchmarks.planning --out FILE |
| theory/results.json | python -m benchmarks.theory --out FILE |
| peers/results.json | python -m benchmarks.peers --out FILE |
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import adaptive, choosing_b, planning
from benchmarks.pages import REPOSITORY, Tables, main, markdown
from benchmarks.peers import tables as peers

FOLDER = REPOSITORY / "benchmarks"
PAGE = FOLDER / "README.md"

Row = dict[str, Any]


@cache
def read(name: str) -> Any:
    """A committed file of raw figures."""
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


# ---------------------------------------------------------------- the local engine


def local(section: str, size: str, case: str, workers: int, quorum: int | None = None) -> dict[str, Row]:
    """Contender -> its row, with this quorum (all workers)."""
    wanted = (section, size, case, workers, quorum or workers)
    rows = read("local/results.json")["rows"]
    keys = ("section", "size", "case", "workers", "quorum")
    return {row["contender"]: row for row in rows if tuple(row[key] for key in keys) == wanted}


def nobody_straggles() -> str:
    head = ["parameters", "workers", "DDP, updates/s", "floor", "ours", "ours / DDP", "ours / floor"]
    rows = []
    for size in ("0.1M", "5M", "25M"):
        for workers in (8, 4):
            found = local("a", size, "a", workers)
            ours = found["ours"]
            rates = [f"{found[who]['updates_per_s']:.2f}" for who in ("ddp", "floor", "ours")]
            cpu = ", ".join(f"{found[who]['cpu_ms_per_update']:.1f}" for who in ("ddp", "floor", "ours"))
            ratios = [f"**{ours['over_ddp']:.2f}**", f"{ours['over_floor']:.2f}", cpu, f"{ours['cpu_over_ddp']:.2f}"]
            rows.append([size, str(workers), *rates, *ratios])
    return markdown([*head, "CPU ms an update: DDP, floor, ours", "ours / DDP"], rows)


def stragglers() -> str:
    head = ["parameters, case", "DDP 8", "floor 8", "ours 8", "ours / floor", "floor 6+2", "ours 6+2", "ours / floor"]
    rows = []
    for size in ("0.1M", "5M"):
        for case in ("b", "c"):
            cells, limits = [], []
            for quorum in (8, 6):
                found = local("stragglers", size, case, 8, quorum)
                cells += [f"{one['updates_per_s']:.2f}" for one in found.values()]
                cells.append(f"{found['ours']['over_floor']:.3f}")
                limits.append(f"{found['ours']['limit_updates_per_s']:.2f}")
            rows.append([f"{size}, {case}", *cells, ", ".join(limits)])
    return markdown([*head, "limit 8, 6+2"], rows)


def scaling() -> str:
    rows = []
    for workers in (2, 4, 8, 16, 32):
        floor, ours = (local("scaling", "0.1M", "a", workers)[who]["cpu_ms_per_update"] for who in ("floor", "ours"))
        rows.append([str(workers), f"{floor:.1f}", f"{ours:.1f}", f"{ours / workers:.2f}"])
    return markdown(["workers", "CPU ms an update, floor", "ours", "ours, for each gradient"], rows)


# ---------------------------------------------------------------- the collective engine

_CONTENDERS = {
    "none": "none",
    "comm": "all-reduce",
    "blocking": "blocking",
    "ddp": "DDP",
    "ours": "ours, FullSync",
    "delayed1": "Delayed(1)",
    "delayed2": "Delayed(2)",
    "delayed3": "Delayed(3)",
}
#: What is compared, with which floor was asked for.
_FLOORS = {
    "FullSync over DDP": ("ours_over", "ddp", 1.1),
    "Delayed(1) over DDP": ("delayed1_over", "ddp", 1.4),
    "Delayed(1) over blocking SGD": ("delayed1_over", "blocking", 1.7),
    "Delayed(1) over the limit": ("delayed1_over", "limit", 0.9),
}


def equal_communication() -> str:
    rows = []
    for one in read("network/measurements.json")["measurements"]:
        cells = [str(one["ms"].get(contender, "")) for contender in _CONTENDERS]
        rows.append([f"{one['net']}, measurement {one['number']}, {one['mbit_per_s']} Mbit/s", *cells])
    return markdown(["", *_CONTENDERS.values()], rows)


def floors() -> str:
    rows = []
    for what, (whose, other, asked) in _FLOORS.items():
        cells = []
        for net in ("googlenet", "alexnet"):
            every = [
                one[whose][other] for one in read("network/measurements.json")["measurements"] if one["net"] == net
            ]
            cells.append(", ".join(f"{value:.2f}" if value >= asked else f"**{value:.2f}**" for value in every))
        rows.append([what, str(asked), *cells])
    return markdown(["", "asked", "googlenet", "alexnet"], rows)


# ---------------------------------------------------------------- adaptive backups


@cache
def adaptive_rows(workers: int) -> list[adaptive.Row]:
    return [row for row in (adaptive.Row(**one) for one in read("adaptive.json")) if row.workers == workers]


def adaptive_table(workers: int) -> str:
    rows = []
    short, long = adaptive.LENGTHS
    for world in (*adaptive.WORLDS, adaptive.CHANGE):
        cells = []
        for ratio in adaptive.RATIOS:
            by_length = {row.updates: row for row in adaptive_rows(workers) if (row.world, row.ratio) == (world, ratio)}
            end = by_length[long]
            split = f"{end.best}+{workers - end.best}"
            cells.append(f"{split}: {end.mean:.3f} ({end.worst:.3f}); {by_length[short].mean:.3f}")
        rows.append([world, *cells])
    return markdown(["world", "noise dominates", "r = 4", "r = 32"], rows)


# ---------------------------------------------------------------- plans


@cache
def planning_rows() -> list[planning.Row]:
    return [planning.Row(**one) for one in read("planning.json")]


def plans() -> str:
    rows = []
    for world, latency in planning.SIMULATED.items():
        full, cut = (
            [row for row in planning_rows() if row.world == world and row.source == source]
            for source in ("full-sync 8/8", "backup 6/8")
        )
        seen = [_percents(max(map(abs, row.errors)) for row in full), _percents(row.behind for row in full)]
        hidden = [_percents(max(map(abs, row.errors[:6])) for row in cut)]
        hidden += [_percents(row.errors[split] for row in cut) for split in (6, 7)]
        named = f"`{latency}`" if world == latency else f"{world}, `{latency}`"
        rows.append([named, *seen, *hidden, _percents(row.behind for row in cut)])
    head = ["world", "from full sync: worst split", "behind the best"]
    return markdown([*head, "from 6+2: worst up to 6+2", "7+1", "8+0", "behind the best"], rows)


def _percents(values: Any) -> str:
    """Of each seed."""
    return ", ".join(f"{100 * value:.1f} %".replace("-", "−") for value in values)


# ---------------------------------------------------------------- theory


def formulas_beside_runs() -> str:
    rows = []
    for one in read("theory/results.json")["formulas"]:
        sign = "≤ " if one["relation"] == "≤" else ""
        rows.append([f"({one['number']})", one["what"], f"{sign}{one['formula']:.4g}", f"{one['run']:.4g}"])
    return markdown(["formula", "case", "formula says", "run gives"], rows)


def joint_arrivals() -> str:
    rows = [
        [one["what"], f"{one['measured_s']:.2f}", f"{one['composed_s']:.2f}"]
        for one in read("theory/results.json")["joint"]
    ]
    return markdown(["mean seconds to the k-th arrival", "as measured", "composed from marginals"], rows)


def late_work() -> str:
    found = read("theory/results.json")["late"]
    backups = list(dict.fromkeys(one["backups"] for one in found))
    rows = [
        [name, *(f"{one['update_s']:.2f}" for one in found if one["late"] == how)]
        for how, name in (("cancel", "cancelled"), ("finish", "left to finish"))
    ]
    return markdown(["", *(f"{16 - b}+{b}" for b in backups)], rows)


TABLES = {
    "local": nobody_straggles,
    "local-stragglers": stragglers,
    "local-scaling": scaling,
    "network": equal_communication,
    "network-floors": floors,
    "adaptive-8": lambda: adaptive_table(8),
    "adaptive-32": lambda: adaptive_table(32),
    "plans": plans,
}
CHOOSING = {
    name: partial(choosing_b.table, noise)
    for name, noise in zip(("every-gradient-counts", "few-are-enough"), choosing_b.NOISES.values(), strict=True)
}
THEORY = {"late": late_work, "joint": joint_arrivals, "formulas": formulas_beside_runs}
PAGES: dict[Path, Tables] = {
    PAGE: TABLES,
    REPOSITORY / "docs" / "choosing-b.md": CHOOSING,
    REPOSITORY / "docs" / "theory.md": THEORY,
    REPOSITORY / "docs" / "peers.md": peers.TABLES,
}

if __name__ == "__main__":
    main(__doc__, PAGES)
