"""python -m benchmarks.network.stragglers [--size 0.1M] [--case b c] [--rate MBIT] [--repeats N] [--quick] [--json]

The two worlds of the local benchmark on hosts with a network: 8 processes that sleep, then compute a gradient, under
DDP, ours with FullSync, and ours with BackupSync(6, 2), which abandons late work or lets it finish; all on the same
draws. The limit is the mean of the order statistic of these draws (where late work finishes: what the simulator gives
on them), plus the least time of an all-reduce alone. Needs root. Exit code 1 if a contender failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import quorate
from benchmarks.local import workload
from benchmarks.local.tables import draw
from benchmarks.local.task import PeerDraws
from benchmarks.local.turns import machine
from benchmarks.network.fleet import Fleet, RunFailedError, Timed, wait_for_quiet
from benchmarks.network.hosts import Hosts, HostsError, warn_of_others, why_not
from benchmarks.network.straggling import CONTENDERS, Straggle
from benchmarks.network.sweep import NOISY_CORES, Row, is_disturbed, middle, ratio_to, say, verdict

QUORUM, BACKUPS = 6, 2
FLOOR = 0.95
CASES = ("b", "c")


def limit_s(contender: str, case: str, warmup: int, steps: int) -> float | None:
    """Mean seconds of a version if all but sleeping were free; None for those that do not sleep."""
    workers = QUORUM + BACKUPS
    if contender in ("ddp", "ours"):
        return 1.0 / (workload.most_updates_per_s(case, workers, workers, warmup, steps) or float("nan"))
    if contender == "backup":
        return 1.0 / (workload.most_updates_per_s(case, workers, QUORUM, warmup, steps) or float("nan"))
    if contender == "finish":
        return finishing_s(case, warmup, steps)
    return None


def finishing_s(case: str, warmup: int, steps: int) -> float:
    """What the simulator gives where late work finishes and is dropped, on the same draws."""
    ends: list[float] = []

    class Ends(quorate.Recorder):
        def applied(self, time: float, update: Any) -> None:
            ends.append(time)

    policy = quorate.BackupSync(QUORUM, BACKUPS, late="finish")
    engine = quorate.Simulated(QUORUM + BACKUPS, PeerDraws(case, steps + 1))
    quorate.train(None, policy, engine, updates=steps, recorders=(Ends(),))
    return (ends[-1] - ends[warmup - 1]) / (steps - warmup)


def measure(fleet: Fleet, given: argparse.Namespace, case: str) -> list[Row]:
    runs: dict[str, list[Row]] = {contender: [] for contender in given.only}
    for repeat in range(given.repeats):
        turn = repeat % len(given.only)
        for contender in (*given.only[turn:], *given.only[:turn]):
            runs[contender].append(_one(fleet, given, contender, case))
            say(f"  {case} {repeat + 1}/{given.repeats} {CONTENDERS[contender]:40} {_short(runs[contender][-1])}")
    return [row(contender, case, runs, given) for contender in given.only]


def _one(fleet: Fleet, given: argparse.Namespace, contender: str, case: str) -> Row:
    job = Straggle(contender, case, given.size, QUORUM, BACKUPS, given.updates, given.warmup)
    tried: list[Timed] = []
    try:
        while len(tried) <= given.again:
            wait_for_quiet(given.quiet, NOISY_CORES)
            tried.append(fleet.run("straggle", job, given.timeout))
            if tried[-1].noise_cores <= NOISY_CORES:
                break
    except RunFailedError as failure:
        return {"failed": str(failure)}
    best = min(tried, key=lambda timed: timed.noise_cores)
    totals = {name: sum(host.get(name, 0) for host in best.hosts) for name in ("used", "dropped")}
    return {**best.as_json(), **totals}


def row(contender: str, case: str, runs: dict[str, list[Row]], given: argparse.Namespace) -> Row:
    """A contender's medians and ratios; its limit has the all-reduce time of the same repeat added."""
    mine = runs[contender]
    sleeping_s = limit_s(contender, case, given.warmup, given.warmup + given.updates)
    # The least of the repeats: what else runs on the machine only adds time, which would make the limit easy to reach.
    comm_s = min((run["iteration_s"] for run in runs.get("comm", []) if "failed" not in run), default=None)
    update_s = middle(mine, "iteration_s")
    limit = None if sleeping_s is None or comm_s is None else sleeping_s + comm_s
    reached = None if limit is None or update_s is None else limit / update_s
    return {
        "case": case,
        "contender": contender,
        "label": CONTENDERS[contender],
        "updates_per_s": middle(mine, "iterations_per_s"),
        "update_s": update_s,
        "limit_s": limit,
        "of_limit": reached,
        "over_ddp": ratio_to(mine, runs.get("ddp", [])),
        "dropped": middle(mine, "dropped"),
        "noise_cores": middle(mine, "noise_cores"),
        "reached": None if contender not in ("backup", "finish") else reached is not None and reached >= FLOOR,
        "disturbed": is_disturbed(runs, (contender, "comm", "ddp")),
        "runs": mine,
    }


def show(report: dict[str, Any]) -> None:
    rate = report["rate_bits_per_s"]
    link = "no rate limit" if rate is None else f"{rate / 1e6:g} Mbit/s a link"
    columns = ["", "updates/s", "ms", "limit, ms", "of the limit", "over DDP", "dropped", "noise, cores", "floor 0.95"]
    for case in dict.fromkeys(row["case"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["case"] == case]
        title = f"{report['size']} parameters, {workload.CASES[case]}; 8 hosts, {link}; medians of {report['repeats']}"
        draw(title, columns, [_cells(row) for row in rows])
        for one in rows:
            failures = [run["failed"] for run in one["runs"] if "failed" in run]
            if failures:
                print(f"{one['label']}: {len(failures)} of {len(one['runs'])} runs failed; the last: {failures[-1]}")


def _cells(row: Row) -> list[str]:
    def number(value: float | None, digits: int, times: float = 1.0) -> str:
        return "–" if value is None else f"{times * value:,.{digits}f}"

    return [
        row["label"],
        number(row["updates_per_s"], 2),
        number(row["update_s"], 1, 1e3),
        number(row["limit_s"], 1, 1e3),
        number(row["of_limit"], 3),
        number(row["over_ddp"], 2),
        number(row["dropped"], 0),
        number(row["noise_cores"], 2),
        "" if row["reached"] is None else verdict(row["reached"], row["disturbed"]),
    ]


def _short(run: Row) -> str:
    if "failed" in run:
        return f"failed: {run['failed']}"
    return f"{1e3 * run['iteration_s']:7.1f} ms, others took {run['noise_cores']:.2f} cores"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.network.stragglers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=workload.WIDTHS, default="0.1M", help="parameters (default 0.1M)")
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="default: both")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="Mbit/s of every link (default: no limit)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="these contenders")
    parser.add_argument("--repeats", type=int, metavar="N", help="default 3; 1 with --quick")
    parser.add_argument("--updates", type=int, metavar="N", help="timed in a run (default 100; 30 with --quick)")
    parser.add_argument("--warmup", type=int, default=10, metavar="N", help="updates before those (default 10)")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds for a run (default 180)")
    parser.add_argument("--quiet", type=float, default=20.0, metavar="S", help="wait so long for others to pause")
    parser.add_argument("--quick", action="store_true", help="one repeat, fewer updates, no second tries")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of tables")
    given = parser.parse_args(arguments)
    given.repeats = (1 if given.quick else 3) if given.repeats is None else given.repeats
    given.updates = (30 if given.quick else 100) if given.updates is None else given.updates
    given.again = 0 if given.quick else 1
    if given.repeats < 1 or given.updates < 2 or given.warmup < 1 or given.timeout <= 0:
        parser.error("--repeats and --warmup must be at least 1, --updates at least 2, and --timeout above 0")
    if given.rate is not None and not 1.0 <= given.rate <= 1e5:
        parser.error("--rate must be 1 to 100000 Mbit/s")
    return given


def main() -> int:
    given = parsed()
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    warn_of_others()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rate = None if given.rate is None else 1e6 * given.rate
    try:
        with Hosts(QUORUM + BACKUPS) as hosts, Fleet(hosts) as fleet:
            hosts.limit(rate)
            rows = [row for case in given.case for row in measure(fleet, given, case)]
    except (HostsError, RunFailedError) as error:
        print(error, file=sys.stderr)
        return 1
    report = {
        "machine": machine(),
        "size": given.size,
        "rate_bits_per_s": rate,
        "repeats": given.repeats,
        "updates": given.updates,
        "rows": rows,
    }
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
