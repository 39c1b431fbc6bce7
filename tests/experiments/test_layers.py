"""The study of layer staleness: its simulator beside the library's own, and from end to end in seconds."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.common.command import main
from experiments.layers.__main__ import EXPERIMENT
from experiments.layers.deep_digits import DeepDigits, DeepNet
from experiments.layers.profiles import LAYERS, PROFILES
from experiments.layers.simulator import NoNet, run_layers
from experiments.layers.study import (
    MODES,
    USUAL,
    Depth,
    Point,
    Setting,
    Training,
    goodness,
    run_depth,
    run_training,
    wanted_depths,
    wanted_trainings,
)
from experiments.layers.timing import timing_of

import quorate

# ---------------------------------------------------------------- when layers are read and written


def test_the_bottom_is_read_first_and_written_last() -> None:
    timing = timing_of((1.0, 1.0, 2.0), forward=0.25)
    assert timing.read == pytest.approx((0.0, 0.0625, 0.125))
    assert timing.write == pytest.approx((1.0, 0.8125, 0.625))
    assert timing.windows() == pytest.approx((1.0, 0.75, 0.5))


def test_a_whole_model_is_as_stale_everywhere() -> None:
    assert timing_of((1.0, 3.0), read="early", write="at the end").windows() == (1.0, 1.0)


def test_transit_is_missed_by_every_layer() -> None:
    without, with_transit = (timing_of((1.0, 3.0), transit=transit).windows() for transit in (0.0, 0.1))
    assert with_transit[0] == 1.0
    assert with_transit[1] == pytest.approx(0.2 + 0.8 * without[1])


@pytest.mark.parametrize("wrong", [{"read": "never"}, {"write": "soon"}, {"transit": 0.5}, {"forward": 1.0}])
def test_a_timing_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(quorate.BadInput):
        timing_of((1.0, 1.0), **wrong)


# ---------------------------------------------------------------- the simulator


def test_a_whole_model_is_the_librarys_async_bit_for_bit() -> None:
    timing = timing_of(PROFILES["equal"], read="early", write="at the end")
    task = DeepDigits(lr=0.02, updates=60)  # so that the rate falls within these 40
    net = DeepNet(task, seed=3)
    ended = list(islice(run_layers(timing, USUAL, 5, 3, net), 40))
    result = quorate.train(task, quorate.Async(), quorate.Simulated(5, USUAL), updates=40, seed=3)
    assert ended[-1].time_s == result.metrics.seconds
    assert sum(one.staleness[0] for one in ended) / 40 == pytest.approx(result.metrics.staleness_mean())
    for name, tensor in net.parameters().items():
        assert torch.equal(tensor, result.parameters[name])


class Diary:
    """Writes down what was read and written; a layer's parameters are the number of its version."""

    def __init__(self, layers: int) -> None:
        self.versions = [0] * layers
        self.computed: list[tuple[int, list[int]]] = []

    def read(self, layer: int) -> int:
        return self.versions[layer]

    def gradients(self, number: int, parameters: list[Any]) -> list[Any]:
        self.computed.append((number, list(parameters)))
        return parameters

    def write(self, layer: int, gradient: Any) -> None:
        self.versions[layer] += 1


def test_a_gradient_is_computed_at_what_was_read_layer_by_layer() -> None:
    diary = Diary(2)
    # Reads at 0 and 1/6 of a step, writes at 2/3 and 1; worker 1 takes 1.9 times as long as worker 0.
    ended = list(islice(run_layers(timing_of((1.0, 1.0)), "constant:1*slow:1=1.9", 2, 1, diary), 5))
    # Ticket 3 reads the bottom at 1.9 s, written at 1.0 and 1.9; the top at 2.22 s, written at 0.67, 1.27 and 1.67.
    assert diary.computed[:5] == [(0, [0, 0]), (1, [0, 0]), (2, [1, 1]), (4, [3, 3]), (3, [2, 3])]
    assert [one.number for one in ended] == [0, 1, 2, 4, 3]
    assert [one.staleness for one in ended] == [[0, 0], [1, 1], [1, 1], [0, 0], [2, 1]]


def test_staleness_is_the_share_of_a_step_times_the_others() -> None:
    trial = Depth("bottom heavy", "late", "at once", 1 / 3, 0.1, USUAL, 10, 3000, 1)
    rows = run_depth(trial)
    windows = timing_of(PROFILES["bottom heavy"], transit=0.1).windows()
    assert [row.mean for row in rows] == pytest.approx([9 * window for window in windows], abs=0.15)
    assert all(row.lowest <= row.low <= row.mean <= row.high <= row.highest for row in rows)


def test_tickets_never_stop_coming() -> None:
    ended = list(islice(run_layers(timing_of((1.0,) * 3), "constant:1", 4, 1, NoNet()), 100))
    assert sorted(one.number for one in ended) == list(range(100))


# ---------------------------------------------------------------- the study


def test_every_case_is_wanted_once() -> None:
    trials = list(wanted_depths(Setting()))
    assert len(set(trials)) == len(trials)
    assert {trial.profile for trial in trials} == set(PROFILES)
    assert all(len(profile) == LAYERS for name, profile in PROFILES.items() if not name.startswith("Inception"))


def test_modes_are_tuned_alike_and_then_trained() -> None:
    setting = Setting(rates=(0.1, 0.2, 0.4), most_rates=3, trainings=2)
    first = list(wanted_trainings(setting, {}))
    assert len(first) == 3 * (len(MODES) + 1)
    found = {trial: [Point(10, 0.9, abs(trial.lr - 0.2), 0.0, 0)] for trial in first}
    chosen = [trial for trial in wanted_trainings(setting, found) if trial.seed]
    assert {trial.lr for trial in chosen} == {0.2}
    assert len(chosen) == 2 * (len(MODES) + 1)


def test_a_training_that_diverges_says_so_and_is_worth_nothing() -> None:
    points = run_training(Training("whole model", 1e6, 60, 1))
    assert points[-1].diverged
    assert goodness(points) == 0.0
    assert goodness([Point(1, 0.5, math.log(2), 0.0, 0)]) == pytest.approx(0.5)


def test_layer_by_layer_is_less_stale() -> None:
    whole, layered = (run_training(Training(mode, 0.01, 50, 1))[-1] for mode in ("whole model", "layer by layer"))
    assert layered.staleness < whole.staleness
    assert not layered.diverged


@pytest.mark.experiments
def test_quick_runs_to_the_figures(tmp_path: Path) -> None:
    assert main(EXPERIMENT, ["run", "--quick", "--out", str(tmp_path)]) == 0
    for name in ("depth.png", "training.png", "summary.md"):
        assert (tmp_path / name).stat().st_size > 100


@pytest.mark.experiments
def test_the_committed_summary_can_be_made_again(tmp_path: Path) -> None:
    for name in ("depth.csv", "training.csv"):
        (tmp_path / name).write_bytes((EXPERIMENT.results / name).read_bytes())
    assert main(EXPERIMENT, ["figures", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "summary.md").read_text() == (EXPERIMENT.results / "summary.md").read_text()
