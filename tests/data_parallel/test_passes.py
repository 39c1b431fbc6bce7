"""After the loop over a loader all processes hold the same newest version, and collectives of the script work."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.data_parallel.launching import Launcher
from tests.data_parallel.scripts.passes import PASSES, SAMPLES
from tests.data_parallel.scripts.resized import EPOCHS
from tests.data_parallel.scripts.resized import SAMPLES as RESIZED
from tests.data_parallel.scripts.steps_and_passes import EVERY, STEPS
from tests.data_parallel.scripts.steps_and_passes import SAMPLES as STEPS_SAMPLES

pytestmark = pytest.mark.data_parallel


@pytest.mark.timeout(480)  # launch.wait says more
@pytest.mark.parametrize(
    ("workers", "cases"),
    [
        (3, []),
        (2, ["slow", "two-loading-slow", "full", "delayed", "delayed-loading"]),
        (4, ["ahead-slow", "two-loading-slow", "delayed"]),
    ],
)
def test_passes_end_together(launcher: Launcher, tmp_path: Path, workers: int, cases: list[str]) -> None:
    launch = launcher.launch("passes.py", workers, tmp_path, str(tmp_path), *cases)
    assert launch.wait(400) == [0] * workers, "\n".join(launch.text(worker) for worker in range(workers))
    seen = [json.loads((tmp_path / f"passes{worker}.json").read_text()) for worker in range(workers)]
    for case in seen[0]:
        for number in range(PASSES):
            ended = [by_case[case][number] for by_case in seen]
            assert len({version for one in ended for version in one["versions"]}) == 1, (case, number)
            assert len({one["digest"] for one in ended}) == 1, (case, number)
            assert len({one["evaluated"] for one in ended}) == 1, (case, number)
            assert Counter(sample for one in ended for sample in one["applied"]) == Counter(range(SAMPLES)), case


@pytest.mark.parametrize("policy", ["full", "backup"])
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_a_restart_with_another_number_of_processes(
    launcher: Launcher, tmp_path: Path, policy: str, before: int, after: int
) -> None:
    used: Counter[tuple[int, int]] = Counter()
    ended = 0
    for workers, updates in ((before, 4), (after, 10_000)):
        (tmp_path / "store").unlink(missing_ok=True)
        launch = launcher.launch("resized.py", workers, tmp_path, str(tmp_path), policy, str(updates))
        assert launch.wait() == [0] * workers, "\n".join(launch.text(worker) for worker in range(workers))
        seen = [json.loads((tmp_path / f"used{workers}-{worker}.json").read_text()) for worker in range(workers)]
        assert {one["begun"] for one in seen} == {ended}
        (ended,) = {one["ended"] for one in seen}
        used.update((epoch, sample) for one in seen for epoch, sample in one["used"])
    assert {one["epoch"] for one in seen} == {EPOCHS}
    assert used == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(RESIZED))


@pytest.mark.timeout(480)
def test_counting_loops_go_through_passes(launcher: Launcher, tmp_path: Path) -> None:
    launch = launcher.launch("steps_and_passes.py", 3, tmp_path, str(tmp_path))
    assert launch.wait(400) == [0] * 3, "\n".join(launch.text(worker) for worker in range(3))
    seen = [json.loads((tmp_path / f"steps{worker}.json").read_text()) for worker in range(3)]
    for case in seen[0]:
        ended = [by_case[case] for by_case in seen]
        for one in ended:
            assert one["met"] == [[number] * 6 for number in range(0, STEPS + 1, EVERY)], case
            assert all(len(set(versions)) == 1 for versions in one["ended"]), case
            assert one["ended"] == ended[0]["ended"], case
            assert one["refused"].startswith("meet_every is 1, but some processes have no batch" * (case == "full"))
        times = Counter(sample for one in ended for sample in one["applied"])
        assert len(set(times.values())) == 1 and len(times) == STEPS_SAMPLES, case  # whole epochs in the end
        assert Counter(sample for one in ended for sample in one["last"]) == Counter(range(STEPS_SAMPLES)), case
