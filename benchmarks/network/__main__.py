"""python -m benchmarks.network [--net alexnet googlenet] [--ratio 0.25 0.5 1 2 unlimited] [--only ddp ours …] [--quick]

quorate.DataParallel beside DDP, blocking SGD and the limits, on hosts made of network namespaces whose links have a
rate limit. For each net and ratio the rate is set so that an all-reduce of the gradient alone takes that ratio times
an iteration without communication; the limit is the slower of the two. Contenders take turns, in another order each
repeat; figures are medians, ratios are medians of the ratios within a repeat. Needs root. Exit code 1 if a
contender failed, 2 if it cannot be run as asked.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.local.turns import machine
from benchmarks.network.contenders import CONTENDERS, DEFAULT
from benchmarks.network.fleet import Fleet, RunFailedError
from benchmarks.network.hosts import MOST_HOSTS, Hosts, HostsError, warn_of_others, why_not
from benchmarks.network.sweep import Effort, Row, Sweep
from benchmarks.network.tables import show
from benchmarks.network.workload import NETS

RATIOS: tuple[float | None, ...] = (0.25, 0.5, 1.0, 2.0, None)


def a_ratio(text: str) -> float | None:
    """A ratio as given on the command line; None for "unlimited"."""
    if text == "unlimited":
        return None
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0.0 < ratio <= 100.0:
        raise argparse.ArgumentTypeError(
            f"{text} is no ratio of communication to computation; give numbers above 0, up to 100, or unlimited"
        )
    return ratio


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "benchmarks.network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="default 4")
    parser.add_argument("--net", nargs="+", choices=NETS, help="; ".join(f"{k}: {net.what}" for k, net in NETS.items()))
    parser.add_argument(
        "--ratio", nargs="+", type=a_ratio, metavar="R", help="communication over computation; unlimited"
    )
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="these contenders; default: all but ddp-small")
    parser.add_argument("--repeats", type=int, metavar="N", help="default 3; 1 with --quick")
    parser.add_argument("--iterations", type=int, metavar="N", help="timed in a run (default 30; 15 with --quick)")
    parser.add_argument("--quick", action="store_true", help="ratio 1 unless --ratio, one repeat, no second tries")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="seconds for a run (default 180)")
    parser.add_argument("--quiet", type=float, default=20.0, metavar="S", help="wait so long for others to pause")
    parser.add_argument(
        "--elsewhere", action="store_true", help="layers sleep instead of computing, as where accelerators compute them"
    )
    parser.add_argument("--no-pin", action="store_true", help="do not pin each host's processes to one core")
    parser.add_argument("--figure", type=Path, metavar="FILE.png", help="draw the bars")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of tables")
    given = parser.parse_args(arguments)
    if not 2 <= given.hosts <= MOST_HOSTS:
        parser.error(f"--hosts must be 2 to {MOST_HOSTS}")
    given.repeats = (1 if given.quick else 3) if given.repeats is None else given.repeats
    given.iterations = (15 if given.quick else 30) if given.iterations is None else given.iterations
    if given.repeats < 1 or given.iterations < 1 or given.timeout <= 0:
        parser.error("--repeats and --iterations must be at least 1, and --timeout above 0")
    if given.figure is not None and (given.figure.suffix != ".png" or not given.figure.parent.is_dir()):
        parser.error("--figure must be a .png file in a folder that exists")
    given.only = list(DEFAULT) if given.only is None else list(dict.fromkeys(given.only))
    return given


def plan(given: argparse.Namespace) -> list[tuple[str, list[float | None]]]:
    """Nets with their ratios. The one of 25M parameters is there for no limit, where nothing hides costs."""
    nets = given.net or (["alexnet", "googlenet"] if given.quick else list(NETS))
    ratios = given.ratio or ([1.0] if given.quick else list(RATIOS))
    return [(net, [None] if net == "alexnet25m" and given.ratio is None else ratios) for net in nets]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    effort = Effort(
        given.repeats,
        given.iterations,
        again=0 if given.quick else 1,
        elsewhere=given.elsewhere,
        quiet_s=given.quiet,
        timeout_s=given.timeout,
    )
    rows: list[Row] = []
    with Hosts(given.hosts) as hosts, Fleet(hosts, not given.no_pin) as fleet:
        sweep = Sweep(hosts, fleet, effort)
        for net, ratios in plan(given):
            rows += sweep.cells([net], ratios, given.only)
        pinned = "no" if given.no_pin else "host i to core i modulo the cores"
    return {
        "machine": machine(),
        "hosts": given.hosts,
        "pinned": pinned,
        "elsewhere": given.elsewhere,
        "repeats": given.repeats,
        "iterations": given.iterations,
        "rows": rows,
    }


def main() -> int:
    given = parsed()
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    warn_of_others()
    signal.signal(signal.SIGTERM, _leave)  # so that the hosts are removed then, too
    try:
        report = measure(given)
    except (HostsError, RunFailedError) as error:
        print(error, file=sys.stderr)
        return 1
    if given.figure is not None:
        from benchmarks.network.figure import draw

        draw(report, given.figure)
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return int(any("failed" in run for row in report["rows"] for run in row["runs"]))


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
