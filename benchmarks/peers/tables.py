"""The tables of docs/peers.md, from the committed run; `python -m benchmarks.tables --write` puts them there."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.pages import markdown
from benchmarks.peers.__main__ import PEERS
from benchmarks.peers.problem import TARGET

RESULTS = Path(__file__).parent / "results.json"
NOT_OVER_LOOPBACK = "shared memory"
_FEW_BYTES = 50_000  # of a gradient of 340,000 bytes: it went another way


class Row(NamedTuple):
    """A contender in one case: medians over the repeats. over_ddp: of the ratios within a repeat."""

    name: str
    label: str
    updates_per_s: float
    samples_per_s: float
    over_ddp: float
    cpu_ms: float  # a gradient
    bytes: float  # a gradient
    accuracy: float
    seconds: float | None  # to TARGET; None if a repeat did not reach it


@cache
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


@cache
def rows(case: str) -> list[Row]:
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for run in report()["runs"]:
        if run["case"] == case and "failed" not in run:
            by_name.setdefault(run["contender"], {})[run["repeat"]] = run
    ddp = by_name["ddp"]
    found = []
    for name, runs in by_name.items():

        def middle(figure: str, runs: dict[int, dict[str, Any]] = runs) -> float:
            return median(run[figure] for run in runs.values())

        quorum = PEERS[name].quorum
        seconds = [run["seconds_to_target"] for run in runs.values()]
        found.append(
            Row(
                name,
                PEERS[name].label,
                middle("updates_per_s"),
                middle("samples_per_s"),
                median(run["samples_per_s"] / ddp[repeat]["samples_per_s"] for repeat, run in runs.items()),
                middle("cpu_ms_per_update") / quorum,
                middle("bytes_per_gradient"),
                middle("accuracy"),
                None if None in seconds else median(seconds),
            )
        )
    order = list(PEERS)
    return sorted(found, key=lambda row: order.index(row.name))


def named(row: Row) -> str:
    return f"**{row.label}**" if row.label.startswith("quorate") else row.label


def costs() -> str:
    """Nobody sleeps: what the systems themselves cost."""
    lines = [
        [
            named(row),
            f"{row.updates_per_s:.1f}",
            f"{row.samples_per_s:,.0f}",
            f"{row.over_ddp:.2f}×",
            f"{row.cpu_ms:.1f}",
            f"{row.bytes / 1e3:.0f}" if row.bytes > _FEW_BYTES else f"{row.bytes / 1e3:.0f}, {NOT_OVER_LOOPBACK}",
        ]
        for row in rows("a")
    ]
    head = ["nobody straggles", "updates/s", "samples/s", "over DDP", "CPU ms a gradient", "KB a gradient, loopback"]
    return markdown(head, lines)


def straggling() -> str:
    """Worlds b and c: pace, and seconds to the target."""
    worlds = [{row.name: row for row in rows(case)} for case in ("b", "c")]
    lines = []
    for name in PEERS:
        found = [world[name] for world in worlds if name in world]
        if len(found) == len(worlds):
            cells = [named(found[0])]
            for row in found:
                seconds = "not in every run" if row.seconds is None else f"{row.seconds:.1f} s"
                cells += [f"{row.samples_per_s:,.0f}", f"{row.over_ddp:.2f}×", seconds]
            lines.append(cells)
    target = f"{TARGET:.0%} after".replace("%", " %")
    one, two = "50 ms + Exp(25 ms): samples/s", "50 ms, 4 % of the time 500 ms: samples/s"
    return markdown(["", one, "over DDP", target, two, "over DDP", target], lines)


def accuracies() -> str:
    """Accuracy after equally many gradients, of each repeat and world."""
    worlds = [{row.name: row for row in rows(case)} for case in ("a", "b", "c")]
    lines = []
    for name, peer in PEERS.items():
        if all(name in world for world in worlds):
            cells = [f"{100 * world[name].accuracy:.2f} %" for world in worlds]
            lines.append([named(worlds[0][name]), {1: "one", 6: "the first 6", 8: "8"}[peer.quorum], *cells])
    return markdown(["", "gradients of an update", "a", "b", "c"], lines)


TABLES = {"peers-costs": costs, "peers-straggling": straggling, "peers-accuracy": accuracies}
