"""Contenders that take turns: one run of each a repeat, in another order each time, and medians over the repeats."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

import quorate
from benchmarks.local.isolated import RunFailedError, can_isolate, figures_of

MEDIANS = ("updates_per_s", "samples_per_s", "update_ms_median", "update_ms_p99", "cpu_ms_per_update", "noise_cores")

Runs = list[dict[str, Any]]  # one a repeat; {"failed": why} where there are no figures


class Runnable(Protocol):
    """A contender with its setting; it can be a key."""

    @property
    def label(self) -> str: ...

    def command(self) -> list[str]: ...


_Contender = TypeVar("_Contender", bound=Runnable)


def one_run(command: list[str], timeout_s: float) -> dict[str, Any]:
    try:
        return figures_of(command, timeout_s)
    except RunFailedError as failure:
        return {"failed": str(failure)}


def with_own_ray(command: list[str], timeout_s: float) -> dict[str, Any]:
    """A run that finds no other Ray of this machine, and whose Ray leaves no files."""
    with tempfile.TemporaryDirectory(prefix="qb-", ignore_cleanup_errors=True) as folder:
        variables = [f"TMPDIR={folder}", f"RAY_TMPDIR={folder}", "RAY_USAGE_STATS_ENABLED=0"]
        return one_run(["env", "-u", "RAY_ADDRESS", *variables, *command], timeout_s)


def in_short(run: dict[str, Any]) -> str:
    if "failed" in run:
        return f"failed: {run['failed']}"
    return (
        f"{run['updates_per_s']:8.2f} updates/s {run['cpu_ms_per_update']:8.1f} CPU ms each, "
        f"others took {run['noise_cores']:.2f} cores"
    )


def take_turns(
    contenders: Sequence[_Contender], repeat: int, run: Callable[[list[str]], dict[str, Any]]
) -> dict[_Contender, dict[str, Any]]:
    """One run of each, beginning with another one each repeat."""
    turn = repeat % len(contenders)
    found = {}
    for contender in (*contenders[turn:], *contenders[:turn]):
        found[contender] = run(contender.command())
        say(f"  {contender.label:10} {in_short(found[contender])}")
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def middle(runs: Runs, figure: str) -> float | None:
    found = [run[figure] for run in runs if figure in run]
    return median(found) if found else None


def ratio(these: Runs, those: Runs, figure: str) -> float | None:
    """The median over the repeats in which both gave figures."""
    found = [a[figure] / b[figure] for a, b in zip(these, those, strict=False) if figure in a and figure in b]
    return median(found) if found else None


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "quorate": quorate.__version__,
        "isolated": can_isolate(),
    }
