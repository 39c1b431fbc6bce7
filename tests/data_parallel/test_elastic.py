"""Processes that really die: the others say so at once, and a restart goes on where the last checkpoint is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data_parallel.scripts.elastic import DIES_AT, UPDATES
from tests.data_parallel.scripts.elastic_samples import EPOCHS, SAMPLES

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"
SAMPLED = SCRIPT.with_name("elastic_samples.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Else a new life meets the addresses of the old one: pytorch/pytorch#135712.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
LIMIT_S = 110


def torchrun(folder: Path, *options: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*launcher, "--max-restarts", "2", str(script), str(folder), *options]
    # A session of its own, so that nothing is left of it if it has to be killed.
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def notes(folder: Path, worker: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"notes{worker}.jsonl").read_text().splitlines()]


def lives(folder: Path, workers: int = 3) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """By worker: how its second life of the run began and ended."""
    for worker in range(workers):
        begins, ends = [note for note in notes(folder, worker) if note["run"] == "run" and note["life"] == 1]
        assert (begins["what"], ends["what"]) == ("begins", "ends")
        yield worker, begins, ends


def check_a_death_cost_nothing(folder: Path, dead: int) -> None:
    (died,) = [note for note in notes(folder, dead) if note["what"] == "dies"]
    assert died["version"] == DIES_AT
    digests = set()
    for worker, begins, ends in lives(folder):
        assert DIES_AT - 1 <= begins["version"] <= DIES_AT
        assert ends["version"] == UPDATES
        (whole,) = [note for note in notes(folder, worker) if note["run"] == "whole" and note["what"] == "ends"]
        assert (ends["digest"], ends["lr"]) == (whole["digest"], whole["lr"])
        digests.add(ends["digest"])
    assert len(digests) == 1


@pytest.mark.long
def test_worker_0_dies_and_its_disk_is_only_one_of_three(tmp_path: Path) -> None:
    """The same bits as a run without a death, with dropout, BatchNorm, momentum and a schedule."""
    done = torchrun(tmp_path, "--dies", "0", "--disks", "--reference")
    assert done.returncode == 0, done.stderr
    check_a_death_cost_nothing(tmp_path, 0)


@pytest.mark.long
def test_another_worker_dies(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--dies", "2", "--reference")
    assert done.returncode == 0, done.stderr
    check_a_death_cost_nothing(tmp_path, 2)


@pytest.mark.long
def test_every_third_version_is_saved(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--dies", "1", "--every", "3", "--reference")
    assert done.returncode == 0, done.stderr
    assert {begins["version"] for _, begins, _ in lives(tmp_path)} == {6}
    for worker, _, ends in lives(tmp_path):
        assert ends["digest"] == notes(tmp_path, worker)[-1]["digest"]


@pytest.mark.long
@pytest.mark.parametrize("policy", ["delayed", "backup"])
def test_other_policies_go_on_too(tmp_path: Path, policy: str) -> None:
    done = torchrun(tmp_path, "--dies", "1", "--policy", policy)
    assert done.returncode == 0, done.stderr
    ended = list(lives(tmp_path))
    assert all(begins["version"] >= DIES_AT - 1 for _, begins, _ in ended)
    assert len({ends["digest"] for *_, ends in ended}) == 1


@pytest.mark.long
@pytest.mark.parametrize("policy", ["full", "backup"])
def test_each_sample_counts_once_per_epoch_though_a_process_died(tmp_path: Path, policy: str) -> None:
    done = torchrun(tmp_path, "--policy", policy, script=SAMPLED)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for file in tmp_path.glob("samples*.jsonl") for line in file.read_text().splitlines()]
    (begun,) = {line["version"] for line in lines if "begins" in line and line["life"] == 1}
    kept = [line for line in lines if "samples" in line and (line["life"] == 1 or line["version"] <= begun)]
    counts = Counter((line["epoch"], sample) for line in kept for sample in line["samples"])
    assert counts == {(epoch, sample): 1 for epoch in range(EPOCHS) for sample in range(SAMPLES)}


@pytest.mark.long
def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--dies-at", "25", "--updates", "40", script=EXAMPLE)
    assert done.returncode == 0, done.stderr
    first, second, last = done.stdout.splitlines()
    assert first == "begins at version 0"
    assert second in ("begins at version 10", "begins at version 20")  # the script does not wait for version 25 itself
    assert last == "ends at version 40"


@pytest.mark.long
@pytest.mark.parametrize("dead", [0, 1])
def test_without_restarts_the_others_end_with_a_sentence(tmp_path: Path, dead: int) -> None:
    """Without torchrun, which would end them anyway."""
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--dies", str(dead), "--store", str(tmp_path / "store")]
    started = [
        subprocess.Popen(
            command, env={**ENVIRONMENT, "RANK": str(worker), "WORLD_SIZE": "3"}, stderr=subprocess.PIPE, text=True
        )
        for worker in range(3)
    ]
    try:
        for worker, process in enumerate(started):
            _, err = process.communicate(timeout=LIMIT_S)
            if worker == dead:
                assert process.returncode == -signal.SIGKILL
            else:
                assert process.returncode == 1
                assert f"ProcessLost: worker {dead} (pid {started[dead].pid}" in err
                assert "died: no further version can be made" in err
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
