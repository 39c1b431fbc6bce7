"""python -m experiments.pages [--write]: the tables of README.md and of pages in docs.

They come from committed data alone: results of the experiments, raw figures of the benchmarks, and what the papers
published (experiments/published.json).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.pages import REPOSITORY, main

from experiments.delay import held_out_tables as delay
from experiments.delay.results import SECONDS, read_iteration_s
from experiments.inception import tables as inception
from experiments.pages import chen, daily, races, readme
from experiments.pages.found import EXPERIMENTS, found


def _inception(make: Callable[[Any], str]) -> Callable[[], str]:
    return lambda: make(found("inception"))


def _held_out_times() -> str:
    return delay.times(found("delay/held-out"), read_iteration_s(EXPERIMENTS / "delay" / "results" / SECONDS))


PAGES = {
    REPOSITORY / "README.md": {"beside-ddp": readme.beside_ddp, "beside-async": readme.beside_async},
    REPOSITORY / "docs" / "results.md": {
        "layer-staleness": chen.layer_staleness,
        "figure-2": chen.figure_2,
        "figures-3-and-4": chen.figures_3_and_4,
        "figure-5": chen.figure_5,
        "figure-5-ours": chen.figure_5_ours,
        "figure-6": chen.figure_6,
        "figure-8": chen.figure_8,
        "initial-rates": chen.initial_rates,
        "figure-9": chen.figure_9,
        "iterations": daily.iterations,
        "accuracy": daily.accuracy,
    },
    REPOSITORY / "docs" / "experiments" / "contest.md": {"shared-rate": races.contest_at_one_rate},
    REPOSITORY / "docs" / "experiments" / "language.md": {"backups": races.language_backups},
    REPOSITORY / "docs" / "experiments" / "pixelcnn.md": {"slow-decay": races.pixelcnn_slow},
    REPOSITORY / "docs" / "delay.md": {
        "nets": delay.nets,
        "held-out": lambda: delay.accuracies(found("delay/held-out")),
        "held-out-times": _held_out_times,
        "held-out-plan": lambda: delay.plan(found("delay/held-out")),
        "iterations": daily.iterations_with_rates,
        "accuracy": daily.accuracy_on_the_way,
    },
    REPOSITORY / "docs" / "experiments" / "inception.md": {
        "pairs": _inception(inception.pairs),
        "seconds": _inception(inception.seconds),
        "initial-rates": _inception(inception.initial_rates),
        "first-epoch": _inception(inception.first_epoch),
        "splits": lambda: inception.splits(found("inception"), found("inception/rounds")),
    },
}

if __name__ == "__main__":
    main(__doc__, PAGES)
