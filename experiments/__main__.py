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
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from experiments.common.children import Children
from experiments.common.command import Experiment
from experiments.common.stopping import sigterm_interrupts, status_of
from quorate.errors import BadInput, check_at_least, unknown_name

#: In the order of docs/results.md.
NAMES = (
    "staleness",
    "layers",
    "stragglers",
    "inception",
    "communication",
    "pixelcnn",
    "contest",
    "language",
    "reinforcement",
    "frontier",
    "delay",
    "rate",
    "lengths",
)
#: Quick ones are small enough to run two at a time.
_QUICK_AT_A_TIME = 2


class Outcome(NamedTuple):
    """What became of an experiment; `status` is None where it was not begun."""

    name: str
    status: int | None
    seconds: float = 0.0
    last_words: str = ""

    @property
    def verdict(self) -> str:
        if self.status is None:
            return "not begun, the time is over"
        return (self.last_words or "done") if self.status == 0 else f"FAILED with status {self.status}"


def experiment(name: str) -> Experiment:
    """An experiment by its name."""
    if name not in NAMES:
        raise unknown_name("experiment", name, NAMES)
    found: Experiment = importlib.import_module(f"experiments.{name}.__main__").EXPERIMENT
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run some experiments; 2 where something given is wrong, 1 where one failed, 130 after Ctrl-C."""
    given = _parser().parse_args(arguments)
    try:
        check_at_least("processes", given.processes, 1)
        if not given.limit_s > 0:
            raise BadInput(f"limit-s is {given.limit_s:g}, but a time must be more than 0; leave it out for no limit")
        chosen = [experiment(name) for name in dict.fromkeys(given.names or NAMES)]
        if given.what == "list":
            for one in chosen:
                print(f"{one.name:14} {one.what} ({one.takes})")
            return 0
        with sigterm_interrupts():
            outcomes = _all(given, [one.name for one in chosen])
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("stopped; what is finished is kept, and the same command goes on", file=sys.stderr)
        return status_of(stopped)
    print()
    for outcome in outcomes:
        print(f"{outcome.name:14} {outcome.seconds:7.0f} s   {outcome.verdict}")
    return int(any(outcome.status for outcome in outcomes))


def _all(given: argparse.Namespace, names: Sequence[str]) -> list[Outcome]:
    until = time.monotonic() + given.limit_s
    children = Children()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(_QUICK_AT_A_TIME if given.what == "quick" else 1) as pool,
    ):

        def one(name: str) -> Outcome:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return Outcome(name, None)
            return _one(children, name, _arguments(given, name, Path(scratch), left_s), tells=given.what == "run")

        try:
            return list(pool.map(one, names))
        except BaseException:
            children.end()
            raise


def _arguments(given: argparse.Namespace, name: str, scratch: Path, left_s: float) -> list[str]:
    """How an experiment's own command is called."""
    if given.what == "figures":
        return ["figures"]
    if given.what == "quick":
        return ["run", "--quick", "--out", str((given.out or scratch) / name)]
    options = ["--device", given.device, "--processes", str(given.processes)]
    options += [] if left_s == math.inf else ["--limit-s", f"{left_s:.3f}"]
    options += ["--data", str(given.data)] if given.data is not None else []
    return ["run", *options]


def _one(children: Children, name: str, arguments: list[str], tells: bool) -> Outcome:
    """In a process of its own, so that one that fails does not take the others with it."""
    began = time.monotonic()
    said: list[str] = []

    def hear(line: str) -> None:
        said.append(line)
        if tells:
            print(f"{name}: {line}", flush=True)

    print(f"{name}: begun", flush=True)
    status = children.run([sys.executable, "-m", f"experiments.{name}", *arguments], hear)
    outcome = Outcome(name, status, time.monotonic() - began, said[-1] if tells and said else "")
    if status and not tells:
        print("\n".join(f"{name}: {line}" for line in said[-60:]), flush=True)
    print(f"{name}: {'done' if status == 0 else outcome.verdict} after {outcome.seconds:.0f} s", flush=True)
    return outcome


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
