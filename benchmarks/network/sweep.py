"""The sweep: a net and a ratio at a time, the link's rate is found, then the contenders take turns."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from benchmarks.network import workload
from benchmarks.network.calibrating import Calibrated, achieved, calibrate, wire_bytes
from benchmarks.network.contenders import CONTENDERS, Run
from benchmarks.network.fleet import Fleet, RunFailedError, Timed, wait_for_quiet
from benchmarks.network.floors import OURS, missed
from benchmarks.network.hosts import Hosts

NOISY_CORES = 0.3
Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    repeats: int = 3
    iterations: int = 30
    warmup: int = 5
    again: int = 1  # times that a run is made again while other programs disturb it; the least disturbed one counts
    elsewhere: bool = False  # layers sleep instead of computing
    quiet_s: float = 20.0  # that it waits for other programs to pause before a run
    timeout_s: float = 180.0


class Sweep:
    """Runs the cells on the hosts, telling on stderr what it is doing."""

    def __init__(self, hosts: Hosts, fleet: Fleet, effort: Effort) -> None:
        self._hosts, self._fleet, self._effort = hosts, fleet, effort

    def cells(self, nets: Sequence[str], ratios: Sequence[float | None], contenders: Sequence[str]) -> list[Row]:
        rows: list[Row] = []
        for net in nets:
            self._hosts.limit(None)
            # The least of several: what else runs on the machine only ever adds time.
            compute_s = min(self._measure("none", net).iteration_s for _ in range(self._effort.repeats + 1))
            say(f"{net}: computation takes {1e3 * compute_s:.0f} ms an iteration on all hosts together")
            for ratio in ratios:
                rows += self._cell(net, ratio, contenders, compute_s)
        return rows

    def _cell(self, net: str, ratio: float | None, contenders: Sequence[str], compute_s: float) -> list[Row]:
        found = self._calibrate(net, ratio, compute_s)
        self._hosts.limit(found.rate_bits_per_s)
        say(f"{net}, communication {told(ratio)}: {_link(found)}, all-reduce {1e3 * found.communication_s:.0f} ms")
        runs: dict[str, list[Row]] = {contender: [] for contender in contenders}
        for repeat in range(self._effort.repeats):
            turn = repeat % len(contenders)
            for contender in (*contenders[turn:], *contenders[:turn]):
                runs[contender].append(self._one(contender, net, found.communication_s))
                say(f"  {repeat + 1}/{self._effort.repeats} {CONTENDERS[contender]:22} {_short(runs[contender][-1])}")
        sent = wire_bytes(workload.parameter_bytes(net), self._hosts.count)
        rate = found.rate_bits_per_s
        comm = middle(runs.get("comm", []), "iteration_s") or found.communication_s
        cell = {
            "net": net,
            "ratio": ratio,
            "rate_bits_per_s": rate,
            "calibrated_communication_s": found.communication_s,
            "calibrated_compute_s": compute_s,
            "rate_achieved": None if rate is None else achieved(sent, comm, rate),
            "sent_bytes": sent,
            "ratio_measured": _quotient(middle(runs.get("comm", []), "iteration_s"), runs.get("none", [])),
        }
        return [row(contender, runs, cell) for contender in contenders]

    def _calibrate(self, net: str, ratio: float | None, compute_s: float) -> Calibrated:
        def measure_s(rate: float | None) -> float:
            self._hosts.limit(rate)
            return min(self._measure("comm", net, iterations=8).iteration_s for _ in range(2))

        if ratio is None:
            return Calibrated(None, measure_s(None))
        return calibrate(measure_s, wire_bytes(workload.parameter_bytes(net), self._hosts.count), ratio * compute_s)

    def _one(self, contender: str, net: str, communication_s: float) -> Row:
        delay = int(contender.removeprefix("delayed")) if contender.startswith("delayed") else 0
        try:
            return self._measure(contender, net, settle_s=2 * delay * communication_s).as_json()
        except RunFailedError as failure:
            return {"failed": str(failure)}

    def _measure(self, contender: str, net: str, iterations: int | None = None, settle_s: float = 0.0) -> Timed:
        given = Run(contender, net, self._effort.iterations, self._effort.warmup, self._effort.elsewhere, settle_s)
        if iterations is not None:
            given = replace(given, iterations=min(iterations, given.iterations))
        tried: list[Timed] = []
        while len(tried) <= self._effort.again:
            wait_for_quiet(self._effort.quiet_s, NOISY_CORES)
            tried.append(self._fleet.run("train", given, self._effort.timeout_s))
            if tried[-1].noise_cores <= NOISY_CORES:
                break
        return min(tried, key=lambda timed: timed.noise_cores)


def row(contender: str, runs: dict[str, list[Row]], cell: Row) -> Row:
    """A contender's medians, and its ratios to the others within the repeats."""
    mine = runs[contender]
    ratios = {other: ratio_to(mine, runs.get(other, [])) for other in ("ddp", "blocking", "none", "comm")}
    bounds = [ratios["none"], ratios["comm"]]
    # The limit is max(compute, communication): of the two ratios the greater, repeat by repeat.
    ratios["limit"] = None if None in bounds else of_limit(mine, runs["none"], runs["comm"])
    return {
        **cell,
        "contender": contender,
        "label": CONTENDERS[contender],
        "iterations_per_s": middle(mine, "iterations_per_s"),
        "iteration_s": middle(mine, "iteration_s"),
        "cpu_ms_per_iteration": middle(mine, "cpu_ms_per_iteration"),
        "noise_cores": middle(mine, "noise_cores"),
        "over": ratios,
        "missed": missed(contender, cell["ratio"], ratios) if contender in OURS else None,
        "disturbed": is_disturbed(runs, (contender, "ddp", "blocking", "none", "comm")),
        "runs": mine,
    }


def is_disturbed(runs: dict[str, list[Row]], contenders: Sequence[str]) -> bool:
    """Whether other programs took part in what is compared, so that neither reaching nor missing a floor says much."""
    return any((middle(runs.get(name, []), "noise_cores") or 0.0) > NOISY_CORES for name in contenders)


def verdict(has_reached: bool, disturbed: bool) -> str:
    return ("reached" if has_reached else "missed") + (", disturbed" if disturbed else "")


def middle(runs: Sequence[Row], figure: str) -> float | None:
    found = [run[figure] for run in runs if figure in run]
    return median(found) if found else None


def ratio_to(these: Sequence[Row], those: Sequence[Row]) -> float | None:
    """The median over the repeats in which both gave figures."""
    return _median_of(
        a["iterations_per_s"] / b["iterations_per_s"]
        for a, b in zip(these, those, strict=False)
        if "failed" not in a and "failed" not in b
    )


def of_limit(mine: Sequence[Row], none: Sequence[Row], comm: Sequence[Row]) -> float | None:
    return _median_of(
        max(a["iterations_per_s"] / b["iterations_per_s"], a["iterations_per_s"] / c["iterations_per_s"])
        for a, b, c in zip(mine, none, comm, strict=True)
        if not any("failed" in run for run in (a, b, c))
    )


def _quotient(communication_s: float | None, none: Sequence[Row]) -> float | None:
    compute_s = middle(none, "iteration_s")
    return None if communication_s is None or compute_s is None else communication_s / compute_s


def _median_of(values: Any) -> float | None:
    found = list(values)
    return median(found) if found else None


def told(ratio: float | None) -> str:
    return "with no rate limit" if ratio is None else f"{ratio:g} × computation"


def _link(found: Calibrated) -> str:
    return "no limit" if found.rate_bits_per_s is None else f"{found.rate_bits_per_s / 1e6:.0f} Mbit/s"


def _short(run: Row) -> str:
    if "failed" in run:
        return f"failed: {run['failed']}"
    return f"{1e3 * run['iteration_s']:7.0f} ms, others took {run['noise_cores']:.2f} cores"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
