"""Real DDP scripts: what each process is charged is its own time, and the rows of all come into one file."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from subprocess import CompletedProcess

import pytest

from quorate.latency.step_times import PHASES, read_step_times
from tests.measuring.scripts import CASES, PROCESSES, SLOW_S, STEPS, run

Ran = tuple[Path, list[CompletedProcess[str]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ddp")
    return folder, run(folder)


@pytest.mark.parametrize("name", CASES)
def test_the_fast_ones_are_not_charged_for_the_slow_one(name: str, ran: Ran) -> None:
    """In step with the others every process takes as long as the slow one; only that one's time is its own."""
    folder, results = ran
    assert [one.returncode for one in results] == [0, 0, 3], results
    path = folder / name / "times.csv"
    lines = path.read_text().splitlines()
    assert lines[0].startswith("step,worker,seconds,data,forward,backward,optimizer,waiting,")
    assert len(lines) == 1 + PROCESSES * STEPS
    assert [entry.name for entry in path.parent.iterdir()] == ["times.csv"]
    times = read_step_times([path]).times
    found = {worker: median(row[worker] for row in times.values()) for worker in range(PROCESSES)}
    slow = found.pop(CASES[name])
    assert slow >= SLOW_S
    assert max(found.values()) < 0.5 * slow  # most of the waiting, were it in, is two thirds
    table = read_step_times([path])
    late, quick = CASES[name], (CASES[name] + 1) % PROCESSES
    means = {phase: table.means(phase) for phase in (*PHASES, "waiting")}
    assert means["data"][late] >= 0.8 * SLOW_S > means["data"][quick]  # it sleeps where a batch is loaded
    assert max(means[phase][late] for phase in PHASES[1:]) < means["data"][late]
    assert means["waiting"][quick] > 0.5 * SLOW_S > means["waiting"][late]


def test_a_failing_process_leaves_a_part_of_every_worker(ran: Ran) -> None:
    folder, results = ran
    assert "fails: the script's own error came through" in results[2].stdout
    assert "the block ended with an error; the step times of worker 2 are in" in results[2].stderr
    assert "process 2 left the block with an error" in results[0].stderr
    assert "process 0 could not write the whole table" in results[1].stderr
    parts = sorted((folder / "fails").iterdir())
    assert [part.name for part in parts] == [f"times.worker{worker}.csv" for worker in range(PROCESSES)]
    assert read_step_times(parts).workers == [0, 1, 2]


def test_nobody_hangs_for_a_process_that_is_gone(ran: Ran) -> None:
    """It went without a word, so the others wait for as long as they were told."""
    folder, results = ran
    parts = sorted((folder / "leaves").iterdir())
    assert [part.name for part in parts] == ["times.worker0.csv", "times.worker1.csv"]
    for part, result in zip(parts, results, strict=False):
        assert str(part) in result.stderr
