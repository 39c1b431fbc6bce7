"""The second paper's tables: Daily et al., Leveraging Asynchronicity in Gradient Descent, beside ours."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.pages import REPOSITORY

from experiments.common.spread import markdown
from experiments.delay.results import Methods, by_method
from experiments.pages.chen import NONE
from experiments.pages.found import found
from experiments.published import DAILY

#: What the paper's columns are called in our benchmark.
CONTENDERS = {
    "SGD": "blocking",
    "layer-wise": "ours",
    "AGD1": "delayed1",
    "AGD2": "delayed2",
    "AGD3": "delayed3",
    "none": "none",
}
_THEIRS = {"alexnet": ("AlexNet, 8 GPUs", "AlexNet, 32 CPUs"), "googlenet": ("GoogLeNet, 8 GPUs", "GoogLeNet, 16 CPUs")}
#: Updates at which our accuracy stands beside theirs after 1,000 to 5,000 batches.
MOMENTS = (588, 1176, 1764, 2352, 2940)


def measurements(net: str) -> list[dict[str, Any]]:
    """Each time that the network benchmark ran a net."""
    file = REPOSITORY / "benchmarks" / "network" / "measurements.json"
    every = json.loads(file.read_text(encoding="utf-8"))["measurements"]
    return [one for one in every if one["net"] == net]


def over_blocking(one: dict[str, Any], contender: str) -> float:
    """How many times as fast as blocking SGD: as the benchmark printed it, or else of the medians."""
    printed: dict[str, float] = one["delayed1_over"]
    if contender == "delayed1":
        return printed["blocking"]
    return float(one["ms"]["blocking"] / one["ms"][contender])


def gains(net: str, contender: str) -> list[float]:
    """That of every measurement that has the contender."""
    return [over_blocking(one, contender) for one in measurements(net) if contender in one["ms"]]


def gain(net: str, contender: str) -> str:
    """The median over measurements."""
    every = gains(net, contender)
    return f"{statistics.median(every):.2f}" + (" (one)" if len(every) == 1 else "")


def _weight(sgd: float, none: float) -> str:
    """Communication that SGD pays over computation, from iterations a second."""
    return f"{(1 / sgd - 1 / none) * none:.2f}"


def _our_weight(net: str) -> str:
    return f"{statistics.median(gains(net, 'none')) - 1:.2f}"


def iterations() -> str:
    rows = []
    for net, theirs in _THEIRS.items():
        for name in theirs:
            rates = DAILY["iterations_per_s"][name]
            cells = [f"{rates[one] / rates['SGD']:.2f}" if one in rates else NONE for one in CONTENDERS]
            rows.append([f"published: {name}", _weight(rates["SGD"], rates["none"]), "1", *cells[1:]])
        ours = [gain(net, contender) for contender in CONTENDERS.values()]
        rows.append([f"ours: {net}, 4 hosts", _our_weight(net), "1", *ours[1:]])
    return markdown(["", "communication / computation", *CONTENDERS], rows)


def iterations_with_rates() -> str:
    """The same with their iterations a second, and DDP beside ours."""
    rows = []
    for net, theirs in _THEIRS.items():
        for name in theirs:
            rates = DAILY["iterations_per_s"][name]
            cells = [
                f"{rates[one]:.2f} ({rates[one] / rates['SGD']:.2f})" if one in rates else NONE for one in CONTENDERS
            ]
            weight = _weight(rates["SGD"], rates["none"])
            rows.append([f"theirs: {name}", f"{rates['SGD']:.2f}", *cells[1:], weight, NONE])
        ours = [gain(net, contender) for contender in CONTENDERS.values()]
        rows.append([f"**ours: {net}, 4 hosts**", "1", *ours[1:], _our_weight(net), gain(net, "ddp")])
    return markdown(["", *CONTENDERS, "communication / computation", "DDP"], rows)


# ---------------------------------------------------------------- accuracy


def finals() -> Methods:
    """The delay experiment's trainings with every seed."""
    return by_method(found("delay"), tuning=False)


def accuracy_at(delay: int, updates: int) -> float:
    """Our alexnet's with a rate of its own, mean over seeds."""
    trainings = finals()["alexnet", delay, "lr" if delay else "none"]
    return statistics.fmean(row.accuracy for one in trainings for row in one.rows if row.update == updates)


def _share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


def accuracy() -> str:
    """At the last of the five moments."""
    theirs = DAILY["alexnet_accuracy_after_1k_to_5k_batches"]
    ours = [accuracy_at(delay, MOMENTS[-1]) for delay in (0, 0, 1, 2)]
    rows = [
        ["published", *(_share(every[-1]) for every in theirs.values())],
        ["ours", *map(_share, ours)],
    ]
    return markdown(["", *theirs], rows)


def accuracy_on_the_way() -> str:
    theirs = DAILY["alexnet_accuracy_after_1k_to_5k_batches"]
    beside = {"SGD": (0, "no delay"), "AGD1": (1, "delay 1, its own rate"), "AGD2": (2, "delay 2, its own rate")}
    rows = []
    for name, every in theirs.items():
        rows.append([f"theirs: {name}", *map(_share, every)])
        if name in beside:
            delay, what = beside[name]
            rows.append([f"**ours: {what}**", *(_share(accuracy_at(delay, updates)) for updates in MOMENTS)])
    return markdown(["", *map(str, range(1, 6))], rows)
