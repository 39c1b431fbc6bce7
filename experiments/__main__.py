"""All experiments: python -m experiments list | quick [NAME …] | run [NAME …] | figures [NAME …].

python -m experiments list                              what there is, and how long it takes
python -m experiments quick                             all of them in minutes, on a CPU, to see that they work
python -m experiments run --data DIR --device cuda      all of them in full, unattended; goes on where it stopped
python -m experiments figures                           every figure and table anew, from the committed tables
"""

from __future__ import annotations

import argparse
import importlib
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from experiments.common.command import Experiment
from quorate.errors import BadInput, unknown_name

#: In the order of docs/results.md.
NAMES = ("delay",)


def experiment(name: str) -> Experiment:
    """An experiment by its name."""
    if name not in NAMES:
        raise unknown_name("experiment", name, NAMES)
    found: Experiment = importlib.import_module(f"experiments.{name}.__main__").EXPERIMENT
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run some experiments, one after the other; 2 where something given is wrong, 1 where one failed."""
    given = _parser().parse_args(arguments)
    try:
        chosen = [experiment(name) for name in given.names or NAMES]
        if given.what == "list":
            for one in chosen:
                print(f"{one.name:14} {one.what} ({one.takes})")
            return 0
        return _all(given, [one.name for one in chosen])
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _all(given: argparse.Namespace, names: Sequence[str]) -> int:
    until = time.monotonic() + given.limit_s
    with tempfile.TemporaryDirectory() as scratch:

        def one(name: str) -> int:
            options: list[str] = []
            if given.what == "quick":
                options = ["--quick", "--out", str((given.out or Path(scratch)) / name)]
            elif given.what == "run":
                left_s = until - time.monotonic()
                if left_s <= 0:
                    print(f"{name}: not begun, the time is over; the same command goes on", flush=True)
                    return 0
                options = ["--device", given.device, "--processes", str(given.processes)]
                options += [] if left_s == math.inf else ["--limit-s", f"{left_s:.0f}"]
                options += ["--data", str(given.data)] if given.data is not None else []
            return _one(name, "figures" if given.what == "figures" else "run", options)

        # Quick ones are small enough to run two at a time.
        with ThreadPoolExecutor(2 if given.what == "quick" else 1) as pool:
            return max(pool.map(one, names), default=0)


def _one(name: str, what: str, options: list[str]) -> int:
    """In a process of its own, so that one that fails does not take the others with it."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", what, *options], capture_output=True, text=True, check=False
    )
    verdict = "done" if done.returncode == 0 else f"FAILED with status {done.returncode}"
    print(f"{name:14} {verdict} in {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode:
        print(done.stdout[-4000:] + done.stderr[-4000:], file=sys.stderr, flush=True)
    return min(done.returncode, 1) if done.returncode > 0 else abs(done.returncode) and 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("list", "quick", "run", "figures"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of them (default: all)")
    parser.add_argument("--out", type=Path, help="with quick: keep what it makes in this folder")
    parser.add_argument("--data", type=Path, help="folder of data sets (default: QUORATE_DATA, then the user's cache)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=1, help="trials side by side")
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="stop after so many seconds in all; go on later"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
