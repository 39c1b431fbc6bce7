"""What delay costs and what repairs it, on CIFAR-10.

python -m experiments.delay run --data DIR --device cuda --processes 16   the whole study; goes on where it stopped
python -m experiments.delay run --quick                                   seconds, on made-up pictures
python -m experiments.delay figures                                       the figures and the table from the curves
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from experiments.delay.settings import FULL, NETS
from quorate.errors import BadInput, check_at_least
from quorate.tasks.cifar10 import load_cifar10

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study or draw it; 2 where something given is wrong."""
    options = _parser().parse_args(arguments)
    try:
        return _figures(options) if options.what == "figures" else _run(options)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.delay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "figures"))
    parser.add_argument("--out", type=Path, help="folder of the curves and figures (default: the committed results)")
    parser.add_argument("--data", type=Path, help="folder that has cifar-10-batches-bin (default: QUORATE_DATA)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--precision", default="tf32", help="float32, tf32 or bfloat16, of a GPU's products")
    parser.add_argument("--processes", type=int, default=1, help="trainings side by side")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="stop after so many seconds; go on later")
    parser.add_argument(
        "--epochs", help="of a net's trainings and of those that tune it, e.g. alexnet=24/8,googlenet=16/6"
    )
    parser.add_argument("--seconds", type=Path, help="CSV of seconds per iteration, by net and delay")
    parser.add_argument("--quick", action="store_true", help="tiny trainings on made-up pictures, with one seed")
    return parser


def _run(options: argparse.Namespace) -> int:
    from experiments.delay.quick import run_quick
    from experiments.delay.study import Study, run_study

    check_at_least("processes", options.processes, 1)
    if not options.limit_s > 0:
        raise BadInput(f"limit-s is {options.limit_s:g}, but a time must be more than 0; leave it out for no limit")
    if options.quick:
        if options.out is None:
            raise BadInput("a quick run must not mix with the study's results; give a folder of its own (--out)")
        run_quick(options.out)
        return _figures(options)
    lengths = dict(FULL)
    for net, epochs in _epochs(options.epochs).items():
        lengths[net] = replace(lengths[net], epochs=epochs[0], tuning_epochs=epochs[1])
    load_cifar10(options.data)  # fetched once, not by every process; and what is missing is said at once
    complete = run_study(
        options.out or RESULTS,
        lengths,
        data=options.data,
        device=options.device,
        precision=options.precision,
        processes=options.processes,
        limit_s=options.limit_s,
        study=Study(),
    )
    print("the study is complete" if complete else "stopped at the time limit; the same command goes on")
    return 0


def _epochs(text: str | None) -> dict[str, tuple[int, int]]:
    found = {}
    for part in text.split(",") if text is not None else []:
        match = re.fullmatch(rf"({'|'.join(NETS)})=([1-9]\d*)/([1-9]\d*)", part)
        if match is None:
            raise BadInput(f"epochs is {text!r}, but it must be the training's and the tuning's, as in alexnet=24/8")
        found[match[1]] = int(match[2]), int(match[3])
    return found


def _figures(options: argparse.Namespace) -> int:
    from experiments.delay.figures import draw_all

    folder = options.out or RESULTS
    for file in draw_all(folder, options.seconds):
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
