"""Traces of real scripts keep the laws, replay, and can be reported and planned on like those of any other engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import quorate
from quorate.metrics import metrics_of
from quorate.trace import feed, read_trace
from tests.data_parallel.conftest import WORKERS, Quorums
from tests.laws.checker import LawChecker, demand

pytestmark = pytest.mark.data_parallel

POLICIES: dict[str, quorate.Policy] = {
    "cancel": quorate.BackupSync(2, 1),
    "finish": quorate.BackupSync(2, 1, late="finish"),
    "deadline": quorate.Deadline(limit=0.02, min_quorum=1),
    "deadline-finish": quorate.Deadline(limit=0.02, min_quorum=2, late="finish"),
    "nan": quorate.BackupSync(3, 0),
    "adaptive": quorate.AdaptiveBackup(min_quorum=1),
    "abandon": quorate.BackupSync(2, 1),
    "uneven": quorate.BackupSync(2, 1),
    "evaluate": quorate.BackupSync(2, 1),
}


class Laws(LawChecker):
    """A script with data of its own has no epochs."""

    def ended(self, time: float, version: int, reason: str, digest: str | None) -> None:
        demand(not self.flying and not self.arrived_tickets, "1: every ticket ends")


@pytest.mark.parametrize("case", POLICIES)
def test_the_trace_keeps_the_laws(quorums: Quorums, case: str) -> None:
    laws = Laws(POLICIES[case], WORKERS, 10**9, 1)
    feed(read_trace(quorums.folder / case), laws)
    assert laws.version == quorums.seen[case][0]["version"]


def test_with_a_sampler_the_trace_has_every_sample_once_an_epoch(quorums: Quorums) -> None:
    laws = LawChecker(quorate.BackupSync(2, 1), WORKERS, batches=16, epochs=2)
    feed(read_trace(quorums.folder / "lending"), laws)
    assert set(laws.uses.values()) == {1}
    assert metrics_of(quorums.folder / "lending").summary()["samples"] == {"applied": 124, "distinct": 62}


@pytest.mark.parametrize("case", [*POLICIES, "lending"])
def test_a_replay_decides_the_same(quorums: Quorums, case: str) -> None:
    assert quorate.replay(quorums.folder / case).lines > 0


@pytest.mark.parametrize("case", [*POLICIES, "lending"])
def test_the_trace_says_what_the_processes_saw(quorums: Quorums, case: str) -> None:
    made = {}
    started = {}
    for record in read_trace(quorums.folder / case):
        if record["event"] == "start":
            started[record["ticket"]] = record["worker"]
        if record["event"] == "apply":
            made[record["version"]] = {started[ticket] for ticket in record["tickets"]}
    seen = quorums.seen[case]
    for version, members in made.items():
        assert members == {worker for worker, one in enumerate(seen) if str(version) in one["used"]}
    assert len(made) == seen[0]["version"]


def test_refused_gradients_are_counted(quorums: Quorums) -> None:
    assert metrics_of(quorums.folder / "nan").summary()["tickets"]["refused"] == 1


def test_what_a_script_records_is_in_the_trace(quorums: Quorums) -> None:
    assert metrics_of(quorums.folder / "cancel").summary()["evaluation"] == {"accuracy": 0.5}


@pytest.mark.parametrize(
    ("command", "says"),
    [("report", "the report"), ("plan", "3 machines, from trace")],
)
def test_the_commands_take_such_a_trace(quorums: Quorums, command: str, says: str, tmp_path: Path) -> None:
    trace = tmp_path / "cancel"
    trace.mkdir()
    for name in ("trace.jsonl", "summary.json"):
        (trace / name).write_bytes((quorums.folder / "cancel" / name).read_bytes())
    call = [sys.executable, "-m", "quorate", command, str(trace)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout + done.stderr
