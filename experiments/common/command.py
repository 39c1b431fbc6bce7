"""The command line that every experiment has: run it, or draw what was run.

python -m experiments.NAME run [--quick] [--data DIR] [--device cuda] [--processes N] [--limit-s S] [--out DIR]
python -m experiments.NAME figures [--out DIR]
"""

from __future__ import annotations

import argparse
import math
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from experiments.common.stopping import sigterm_interrupts, status_of
from quorate.errors import BadInput, QuorateError, check_at_least


@dataclass(frozen=True)
class Options:
    """How an experiment is to be run.

    out: the folder of its table and figures.
    data: the folder of data sets (None: the variable QUORATE_DATA, then the user's cache).
    quick: seconds on a CPU, along the same path, with numbers that mean nothing.
    """

    out: Path
    data: Path | None = None
    device: str = "cpu"
    processes: int = 1
    limit_s: float = math.inf
    quick: bool = False


class Experiment(ABC):
    """One question, its trials, and its figures."""

    #: The folder below `experiments/`, and what the question is, in one sentence.
    name: ClassVar[str]
    what: ClassVar[str]
    #: Where the full setting is meant to run, and about how long, as measured: "one GPU, 20 minutes"; for the list.
    takes: ClassVar[str]

    @property
    def results(self) -> Path:
        """The committed results."""
        return Path(__file__).parent.parent / self.name / "results"

    @abstractmethod
    def run(self, options: Options) -> bool:
        """Run what is not there yet; True when everything is."""

    @abstractmethod
    def figures(self, folder: Path) -> list[Path]:
        """Draw every figure and table from what is in the folder; gives the files. Only here matplotlib is needed."""


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> int:
    """Run an experiment or draw it; 2 where something given is wrong, 1 where it failed, 130 after Ctrl-C."""
    given = _parser(experiment).parse_args(arguments)
    try:
        with sigterm_interrupts():
            return _do(experiment, given)
    except QuorateError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.__cause__ is not None and not isinstance(error, BadInput):
            traceback.print_exception(error.__cause__)
        return 2 if isinstance(error, BadInput) else 1
    except KeyboardInterrupt as stopped:
        print("stopped; what is finished is kept, and the same command goes on", file=sys.stderr)
        return status_of(stopped)


def _do(experiment: Experiment, given: argparse.Namespace) -> int:
    check_at_least("processes", given.processes, 1)
    if not given.limit_s > 0:
        raise BadInput(f"limit-s is {given.limit_s:g}, but a time must be more than 0; leave it out for no limit")
    if given.quick and given.out is None:
        raise BadInput("a quick run must not mix with the committed results; give a folder of its own (--out)")
    if given.quick:
        torch.set_num_threads(1)  # nets of quick runs are too small to share
    folder = given.out or experiment.results
    if given.what == "run":
        complete = experiment.run(
            Options(folder, given.data, given.device, given.processes, given.limit_s, given.quick)
        )
        print("complete" if complete else "stopped at the time limit; the same command goes on", flush=True)
        if not given.quick:
            return 0
    for file in experiment.figures(folder):
        print(file)
    return 0


def _parser(experiment: Experiment) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{experiment.name}",
        description=f"{experiment.what} Takes: {experiment.takes}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what", choices=("run", "figures"), help="run the trials that are not in the folder yet, or draw what is there"
    )
    parser.add_argument("--out", type=Path, help="folder of the table and the figures (default: the committed results)")
    parser.add_argument("--data", type=Path, help="folder of data sets (default: QUORATE_DATA, then the user's cache)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--processes", type=int, default=1, help="trials side by side")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="stop after so many seconds; go on later")
    parser.add_argument("--quick", action="store_true", help="the same path in seconds, on a CPU; then the figures")
    return parser
