"""What the second protocol came to, as tables for the page. Cells without trainings say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from experiments.common.spread import markdown
from experiments.delay import held_out
from experiments.delay.held_out import DATA_SETS, REPAIRS, STAGES, Trial, gradients, least_trials
from experiments.delay.results import Methods, Training, by_method, seconds_to, spread_of
from experiments.delay.rows import TUNING_SEED, Row
from experiments.delay.settings import DELAYS, NETS, WORKERS
from experiments.delay.tables import cell
from experiments.delay.training import net_of

NOT_RUN, NOT_REACHED = "not run", "not reached"
REPAIR_NAMES = {"lr": "its own rate", "clip": "its own rate, clipped", "warm-up": "its own rate, delay warms up"}
#: What the first protocol took, in trainings whose shares of the two nets are nearly the same as here.
FIRST_GRADIENTS, FIRST_MINUTES = 679_728, 21

Curves = Mapping[Trial, list[Row]]


def of_data(found: Curves, data: str, tuning: bool = False) -> Methods:
    """The trainings with one data set."""
    return by_method({trial: rows for trial, rows in found.items() if trial.data == data}, tuning)


def chosen_repair(found: Curves, data: str, net: str, delay: int) -> str | None:
    """The repair of a delay whose tuning ended best, by held-out pictures, among those that were trained in full."""
    finals = of_data(found, data)
    best: dict[str, float] = {}
    for repair in REPAIRS:
        for one in finals.get((net, delay, repair), []):
            assert isinstance(one.setting, Trial)
            trial = replace(one.setting, seed=TUNING_SEED)
            best[repair] = Training(trial, found[trial]).accuracy
    return max(best, key=best.__getitem__, default=None)


def accuracies(found: Curves) -> str:
    """Test accuracy of every method."""
    rows = []
    for data in DATA_SETS:
        finals = of_data(found, data)
        for net in NETS:
            for delay in DELAYS:
                planned = [stage.repair for stage in STAGES if stage.data == data and delay in stage.delays]
                if planned:
                    cells = [_cell(finals.get((net, delay, repair)), repair in planned) for repair in REPAIRS]
                    rows.append([data, net, delay, *cells])
    return markdown(["pictures", "net", "delay", *(REPAIR_NAMES[repair] for repair in REPAIRS)], rows)


def _cell(trainings: list[Training] | None, is_planned: bool) -> str:
    if not trainings:
        return NOT_RUN if is_planned else ""
    setting = trainings[0].setting
    assert isinstance(setting, Trial)
    return f"{cell(trainings)}, rate {setting.lr:g}" + (f", norm {setting.clip:g}" if setting.clip else "")


def times(found: Curves, iteration_s: Mapping[tuple[str, int], float]) -> str:
    """Seconds to the accuracy that a delay ends with, and those that a training without a delay has it after."""
    rows = []
    for data in DATA_SETS:
        finals = of_data(found, data)
        for net in NETS:
            without = finals.get((net, 0, "lr"))
            for delay in DELAYS[1:]:
                repair = chosen_repair(found, data, net, delay)
                if repair is None or not without:
                    continue
                trainings = finals[net, delay, repair]
                end = spread_of(trainings).mean
                late = seconds_to(trainings, end, iteration_s[net, delay])
                sync = seconds_to(without, end, iteration_s[net, 0])
                ends = [data, net, delay, REPAIR_NAMES[repair], f"{100 * end:.1f}"]
                if late is not None:
                    sooner = [NOT_REACHED] * 2 if sync is None else [f"{sync:.0f}", f"{sync / late:.2f}"]
                    rows.append([*ends, f"{late:.0f}", *sooner])
    if not rows:
        return f"{NOT_RUN.capitalize()}.\n"
    return markdown(["pictures", "net", "delay", "method", "ends at", "after, s", "without a delay, s", "ratio"], rows)


def plan(found: Curves) -> str:
    """The stages in their order, what each takes at least, and how much of it is done."""
    rows = []
    total = 0
    for stage in STAGES:
        costs = sum(least_trials(stage) * gradients(stage.data, net, WORKERS) for net in NETS)
        total += costs
        trials = [trial for trial in found if (trial.data, trial.repair) == (stage.data, stage.repair)]
        done = sum(trial.delay in stage.delays for trial in trials)
        delays = " and ".join(map(str, stage.delays))
        least = least_trials(stage) * len(NETS)
        rows.append([stage.data, delays, REPAIR_NAMES[stage.repair], least, f"{costs:,}", _minutes(costs), done])
    rows.append(["all", "", "", sum(int(row[3]) for row in rows), f"{total:,}", _minutes(total), len(found)])
    return markdown(["pictures", "delay", "method", "trainings", "gradients", "H200 minutes, about", "run"], rows)


def _minutes(count: int) -> str:
    return f"{FIRST_MINUTES * count / FIRST_GRADIENTS:.1f}"


def nets() -> str:
    """How large the nets of the study are, counted from the nets themselves."""
    rows = []
    for name in NETS:
        net, with_more = net_of(name), net_of(name, DATA_SETS[held_out.TINY].classes)
        layers = [one for one in net.modules() if type(one).__name__ in ("Conv2d", "Linear")]
        dense = sum(_parameters(one) for one in layers if type(one).__name__ == "Linear")
        numbers = [_parameters(net), len(layers), dense, _parameters(with_more)]
        rows.append([name, *(f"{number:,}" for number in numbers)])
    header = ["net", "parameters", "convolutions and dense layers", "parameters in dense layers"]
    return markdown([*header, f"parameters with {DATA_SETS[held_out.TINY].classes} classes"], rows)


def _parameters(net: Any) -> int:
    return sum(one.numel() for one in net.parameters())
