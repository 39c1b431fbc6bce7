"""The study of communication: its pieces, and from end to end in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.scaling.links import Load, Rate, queued_s
from experiments.common.command import main
from experiments.communication.__main__ import EXPERIMENT
from experiments.communication.choosing import bought, by_backups, quorum_of
from experiments.communication.layouts import (
    ALL_REDUCE,
    FREE,
    LATENCY_S,
    LAYOUTS,
    LINK_BYTES_PER_S,
    MODEL_BYTES,
    ring_bytes,
    ring_seconds,
)
from experiments.communication.study import WORLDS, Cost, Setting, Split, run_split, wanted

from quorate.latency import parse_latency

SPLIT = Split("no tail", "one server", "cancel", 8, 2, 20, 1)


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_is_one_that_the_library_knows(world: str) -> None:
    parse_latency(WORLDS[world]).sampler(1, 20)


@pytest.mark.parametrize("layout", ["one server", "10 shards"])
def test_seconds_are_those_of_the_formula_where_nobody_straggles(layout: str) -> None:
    (cost,) = run_split(replace(SPLIT, layout=layout))
    load = Load(workers=10, version_bytes=MODEL_BYTES, gradient_bytes=MODEL_BYTES, backups=2)
    rate = Rate(bytes_per_s=LINK_BYTES_PER_S, latency_s=LATENCY_S)
    assert cost.seconds == pytest.approx(queued_s(load, rate, LAYOUTS[layout].shards, 1.6), rel=0.01)


def test_a_backup_costs_a_version_and_its_gradient_only_if_it_is_sent() -> None:
    (cancelled,) = run_split(replace(SPLIT, world="lognormal, s = 0.2", layout=FREE))
    assert cancelled.bytes_sent == pytest.approx((10 + 8) * MODEL_BYTES)
    assert cancelled.bytes_wasted == pytest.approx(2 * MODEL_BYTES)
    (finished,) = run_split(replace(SPLIT, world="lognormal, s = 0.2", layout=FREE, late="finish", updates=200))
    assert finished.bytes_wasted / finished.bytes_sent > 0.1
    assert finished.wasted_s > 0
    assert finished.seconds > cancelled.seconds


def test_a_ring_moves_as_many_bytes_whoever_is_late() -> None:
    split = replace(SPLIT, layout=ALL_REDUCE)
    (ring,), (free,) = run_split(split), run_split(replace(split, layout=FREE))
    assert ring.bytes_sent == ring_bytes(10) == 18 * MODEL_BYTES
    assert ring.bytes_wasted == 4 * MODEL_BYTES
    assert ring.seconds == pytest.approx(free.seconds + ring_seconds(10))
    assert ring_seconds(10) == pytest.approx(1.8 * MODEL_BYTES / LINK_BYTES_PER_S + 18 * LATENCY_S)


def cost(seconds: float) -> list[Cost]:
    return [Cost(seconds, 1.0, 0.0, 1.0, 0.0, 0.0)]


def test_more_machines_are_weighed_in_both_roles() -> None:
    found = {}
    for seed, (none, backups, workers) in enumerate(((2.0, 1.0, 2.0), (2.0, 2.0, 2.0))):
        found[replace(SPLIT, backups=0, seed=seed)] = cost(none)
        found[replace(SPLIT, backups=2, seed=seed)] = cost(backups)
        found[replace(SPLIT, quorum=10, backups=0, seed=seed)] = cost(workers)
    assert quorum_of(found) == 8
    one = bought(found, SPLIT.world, SPLIT.layout, 2)
    assert one is not None
    assert one.machines == 1.25
    assert (one.as_backups.lowest, one.as_backups.highest) == (1.0, 2.0)
    assert one.as_workers.mean == pytest.approx(1.25**0.85)
    assert bought(found, SPLIT.world, SPLIT.layout, 3) is None
    assert list(by_backups(found, SPLIT.world, SPLIT.layout, "cancel", 8)) == [0, 2]


def test_every_split_is_wanted_once() -> None:
    trials = list(wanted(Setting()))
    assert len(set(trials)) == len(trials)
    assert max(trial.quorum + trial.backups for trial in trials) <= 100
    assert {trial.layout for trial in trials} == set(LAYOUTS)


@pytest.mark.experiments
def test_quick_runs_to_the_figures(tmp_path: Path) -> None:
    assert main(EXPERIMENT, ["run", "--quick", "--out", str(tmp_path)]) == 0
    for name in ("costs.png", "bought.png", "summary.md"):
        assert (tmp_path / name).stat().st_size > 100


@pytest.mark.experiments
def test_the_committed_summary_can_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "splits.csv").write_bytes((EXPERIMENT.results / "splits.csv").read_bytes())
    assert main(EXPERIMENT, ["figures", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "summary.md").read_text() == (EXPERIMENT.results / "summary.md").read_text()
