"""Loops that count iterations, samplers that lose samples, and wrappers around wrappers, in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quorate.events import WITHDRAWN
from quorate.trace_replay import replay
from tests.data_parallel.launching import Launcher
from tests.data_parallel.scripts.loops import EVERY, STEPS

pytestmark = pytest.mark.data_parallel
WORKERS = 3


@pytest.fixture(scope="module")
def loops(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loops")
    launch = launcher.launch("loops.py", WORKERS, folder, str(folder))
    assert launch.wait(110) == [0] * WORKERS, "\n".join(launch.text(worker) for worker in range(WORKERS))
    return [json.loads((folder / f"loops{worker}.json").read_text()) for worker in range(WORKERS)]


@pytest.mark.parametrize("case", ["backup", "finish", "deadline", "full", "delayed"])
def test_counting_loops_end_together_and_nobody_misses_a_meeting(loops: list[dict[str, Any]], case: str) -> None:
    for seen in (one[case] for one in loops):
        assert seen["met"] == [[number] * WORKERS for number in range(0, STEPS + 1, EVERY)]
        assert seen["version"] == STEPS
        assert seen["numbers"] == sorted(set(seen["numbers"]))
        assert {0, EVERY, 2 * EVERY} <= set(seen["numbers"]) <= set(range(STEPS))
        assert seen["again"] == []
    assert len({tuple(one[case]["digests"]) for one in loops}) == 1
    if case in ("full", "delayed"):
        assert loops[1][case]["numbers"] == list(range(STEPS))


def test_samples_that_a_distributed_sampler_loses_are_said_once(loops: list[dict[str, Any]]) -> None:
    assert sum(one["losing"]["lost"] for one in loops) > 0, "nobody was late, so nothing was tried"
    for seen in (one["losing"] for one in loops):
        said = [sentence for sentence in seen["said"] if "quorate.Sampler instead of a DistributedSampler" in sentence]
        assert len(said) == (1 if seen["lost"] else 0)
        assert all("a gradient of 3 samples was not used" in sentence for sentence in said)
        for versions in seen["versions"]:
            assert len(set(versions)) == 1


def test_gradients_that_were_taken_back_for_a_meeting_replay(loops: list[dict[str, Any]]) -> None:
    trace = Path(loops[0]["losing"]["trace"])
    assert WITHDRAWN in trace.read_text(), "nobody waited for a quorum that could not come"
    assert replay(trace).lines > 10


@pytest.mark.parametrize("policy", ["full-sync", "delayed"])
def test_every_gradient_between_meetings_is_used(loops: list[dict[str, Any]], policy: str) -> None:
    for seen in loops:
        assert seen[f"often, {policy}"]["versions"] == list(range(1, 151))


def test_who_runs_on_in_vain_is_told_how_to_end_with_the_others(loops: list[dict[str, Any]]) -> None:
    seen = loops[0]["running on"]
    assert seen["over"] > 1
    assert seen["steps"] == []
    (said,) = [sentence for sentence in seen["said"] if "no more updates are made" in sentence]
    assert "for step in model.steps(…)" in said


def test_wrappers_around_wrappers_are_refused(loops: list[dict[str, Any]]) -> None:
    for seen in loops:
        around, twice, inside, count, every = seen["refusals"]
        assert around.startswith("DistributedDataParallel got a quorate.DataParallel: wrap the bare module")
        assert twice.startswith("quorate.DataParallel got a DataParallel: wrap the bare module")
        assert inside.startswith("quorate.DataParallel got a DistributedDataParallel: wrap the bare module")
        assert count == "count is -1, but it must be at least 0"
        assert every == "meet_every is 0, but it must be at least 1"
