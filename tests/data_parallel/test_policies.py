"""Every policy that DataParallel takes trains in 2, 3 and 4 processes, on batches that divide among them and others."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.data_parallel.launching import Launcher
from tests.data_parallel.scripts.policies import EPOCHS, ITERATIONS, POLICIES, SAME_BITS, samples_for

pytestmark = pytest.mark.data_parallel

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu_collective.py"

Seen = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, 3, 4])
def seen(request: pytest.FixtureRequest, launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """By case, what each process saw."""
    workers, folder = request.param, tmp_path_factory.mktemp("policies")
    launch = launcher.launch("policies.py", workers, folder, str(folder))
    assert launch.wait(110) == [0] * workers, "\n".join(launch.text(worker) for worker in range(workers))
    by_worker = [json.loads((folder / f"{worker}.json").read_text()) for worker in range(workers)]
    return {case: [one[case] for one in by_worker] for case in by_worker[0]}


@pytest.mark.parametrize("workers", [1, 2])
def test_the_benchmark_that_compares_with_a_gpu_runs_without_one(
    launcher: Launcher, tmp_path: Path, workers: int
) -> None:
    output = launcher.ran(BENCHMARK, workers, tmp_path, "--updates", "8", "--device", "cpu")
    cases = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(cases) == 6, output
    assert all(case["twice on the last device"][0] == 0.0 for case in cases), "the same bits, twice"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_each_sample_counts_once_an_epoch(seen: Seen, policy: str, kind: str) -> None:
    case = seen[f"{policy}, {kind}"]
    used = Counter(number for one in case for number in one["used"])
    assert used == dict.fromkeys(range(samples_for(len(case))[kind]), EPOCHS)
    assert len({one["version"] for one in case}) == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["own even", "own uneven"])
def test_all_end_at_one_version_with_batches_of_their_own(seen: Seen, policy: str, kind: str) -> None:
    case = seen[f"{policy}, {kind}"]
    assert len({one["version"] for one in case}) == 1
    if policy in ("full", "delayed 0", "delayed 1", "delayed 3, warming up"):
        assert case[0]["version"] == ITERATIONS + (len(case) - 1 if kind == "own uneven" else 0)


@pytest.mark.parametrize("policy", SAME_BITS)
def test_the_bits_do_not_depend_on_how_busy_the_machine_is(seen: Seen, policy: str) -> None:
    case = seen[f"{policy}, bits"]
    assert len({digest for one in case for digest in one["digests"]}) == 1
