"""What the pages open with: who is slow, in what, what it costs, and commands that work."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from quorate.cli import main
from quorate.reporting.findings import command_for, finding, with_advice
from quorate.reporting.report.data import report_data
from quorate.reporting.report.trace_pass import gather
from quorate.trace import read_header
from tests.reporting.traces import BACKUP, END, HEADER, asynchronous, join, rounds_of, start, write


def findings_of(folder: Path, **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report_data([gather(folder)], **more)["runs"][0]["findings"]
    return found


def test_a_slow_worker_is_named_with_its_part_its_cost_and_a_command(tmp_path: Path) -> None:
    folder = write(tmp_path / "my run", rounds_of({0: 1.0, 1: 1.0, 2: 1.0, 3: 2.2}))
    (found,) = findings_of(folder)
    assert found == {
        "kind": "slow",
        "text": "Worker 3 is ×2.2 slow in computing: 2.20 s a gradient, the usual worker takes 1.00 s. Waiting for it "
        "costs 12.0 s, 55% of the run. Without it, an update takes 1.00 s instead of 2.20 s, with 3 of 4 gradients: "
        "×1.65 the samples per second. Look for other load on its machine, or leave it out.",
        "command": f"quorate plan {shlex.quote(str(folder))} --what-if without=3",
        "workers": [3],
    }


def test_the_part_that_a_worker_is_slow_in_is_named(tmp_path: Path) -> None:
    for name, words, look in (
        ("data_s", "in loading data", "Look at its data loader and its disk"),
        ("transfer_s", "in sending", "Look at its network link"),
        (None, "in waiting", "Look for other load"),
    ):
        records = rounds_of({0: 1.0, 1: 1.0, 2: 3.0}, slow_part=name)
        (found,) = findings_of(write(tmp_path / words, records))
        assert f"Worker 2 is ×3.0 slow {words}: " in found["text"] and look in found["text"]


def test_of_two_workers_the_slower_one_is_slow(tmp_path: Path) -> None:
    (found,) = findings_of(write(tmp_path, rounds_of({0: 1.0, 1: 2.2})))
    assert found["text"].startswith("Worker 1 is ×2.2 slow in computing")
    assert found["text"].endswith(
        "with 1 of 2 gradients: ×1.10 the samples per second. Look for other load on its machine, or leave it out."
    )
    (found,) = findings_of(write(tmp_path / "milder", rounds_of({0: 1.0, 1: 1.5})))
    assert found["text"].endswith("×0.75 the samples per second. Look for other load on its machine.")


def test_slow_workers_are_counted_together(tmp_path: Path) -> None:
    """Alone, neither costs anything: the other would be waited for."""
    (found,) = findings_of(write(tmp_path, rounds_of({0: 1.0, 1: 3.0, 2: 1.0, 3: 3.0, 4: 1.0})))
    assert found["text"].startswith("Workers 1 (×3.0 in computing) and 3 (×3.0 in computing) are slow;")
    assert "Waiting for them costs 20.0 s, 67% of the run. Without them, an update takes 1.00 s" in found["text"]
    assert "Look for other load on their machine, or leave them out." in found["text"]
    assert found["command"].endswith("--what-if without=1+3") and found["workers"] == [1, 3]


def test_when_nobody_is_slow_that_is_said(tmp_path: Path) -> None:
    (found,) = findings_of(write(tmp_path, rounds_of({0: 1.0, 1: 1.0, 2: 1.02})))
    assert (found["kind"], found["command"]) == ("even", None)
    assert found["text"] == "No worker is slow: the slowest, worker 2, takes ×1.02 the time of the usual worker."


def test_chance_is_told_apart_from_a_slow_worker(tmp_path: Path) -> None:
    records = rounds_of(
        *({worker: 2.0 if version % 4 == worker else 1.0 for worker in range(4)} for version in range(8))
    )
    even, chance = findings_of(write(tmp_path, records))
    assert even["text"].startswith("No worker is slow")
    assert chance["text"] == (
        "A different worker comes last each time; waiting for it takes 1.00 s an update, 50% of the time. "
        "A backup would save that, for one gradient less an update."
    )


def test_of_a_quorum_the_dropped_work_is_counted(tmp_path: Path) -> None:
    slow = findings_of(write(tmp_path, BACKUP))[0]
    assert slow["text"].startswith("Worker 2 is ×1.5 slow in computing: 3.00 s a gradient")
    assert "Updates do not wait for it: 33% of its gradients came too late and were dropped, 2.00 s of" in slow["text"]


@pytest.mark.parametrize(
    "policy", [{"name": "async", "max_staleness": None}, {"name": "softsync", "quorum": 1}], ids=lambda one: one["name"]
)
def test_without_rounds_missing_gradients_are_counted(policy: dict[str, Any], tmp_path: Path) -> None:
    """The quorum of softsync is no quorum of a round."""
    header = {**HEADER, "policy": policy, "task": None, "workers": 2}
    records, ticket, version = [header, join(0.0, 0), join(0.0, 1)], 0, 0
    ends: list[tuple[float, int]] = sorted(
        [(float(at), 0) for at in range(1, 13)] + [(3.0 * at, 1) for at in range(1, 5)]
    )
    records += [start(0.0, worker, worker, 0) for worker in (0, 1)]
    open_tickets, ticket = {0: 0, 1: 1}, 2
    for time, worker in ends:
        version += 1
        records.append({"event": "arrive", "time": time, "ticket": open_tickets[worker]})
        applied = {"event": "apply", "time": time, "version": version, "tickets": [open_tickets[worker]]}
        records.append({**applied, "reason": "arrived"})
        records.append(start(time, ticket, worker, version))
        open_tickets[worker], ticket = ticket, ticket + 1
    over = [
        {"event": "cancel", "time": 12.0, "ticket": one, "reason": "the run is over"} for one in open_tickets.values()
    ]
    records += [*over, {**END, "time": 12.0, "version": version, "reason": "limit reached"}]
    (found,) = findings_of(write(tmp_path, records))
    assert "Worker 1 is ×3.0 slow in computing" in found["text"]
    assert (
        "At the usual pace 8 more gradients would have come from it: that costs 4.00 s, 33% of the run."
        in found["text"]
    )


def test_runs_of_few_tickets_or_none_have_no_verdict(tmp_path: Path) -> None:
    assert findings_of(write(tmp_path / "none", [HEADER, {**END, "version": 0}])) == []
    assert findings_of(write(tmp_path / "one", rounds_of({0: 1.0}))) == []
    kinds = [one["kind"] for one in findings_of(write(tmp_path / "short", rounds_of({0: 1.0, 1: 3.0}, updates=2)))]
    assert kinds == []


def test_a_run_that_was_stopped_shows_the_command_to_go_on(tmp_path: Path) -> None:
    records = rounds_of({0: 1.0, 1: 1.0})
    records[0] = {**records[0], "engine": {"name": "local", "latency": None, "faults": None}}
    records[-1] = {**records[-1], "reason": "stopped by SIGINT"}
    folder = write(tmp_path / "my run", records)
    stopped = findings_of(folder)[0]
    assert stopped["text"] == "The run was ended early: stopped by SIGINT, after 10 updates."
    assert stopped["command"] is None, "there is no checkpoint"
    (folder / "checkpoints" / "00000010").mkdir(parents=True)
    (folder / "checkpoints" / "00000010" / "manifest.json").write_text("{}")
    for shown in (folder, folder / "trace.jsonl"):
        stopped = findings_of(shown)[0]
        assert stopped["command"] == f"quorate train --resume {shlex.quote(str(folder))}"
        assert stopped["text"].endswith("To go on from its last checkpoint:")
    assert findings_of(write(tmp_path / "torn", rounds_of({0: 1.0, 1: 1.0})[:-1]))[0]["text"].startswith(
        "The run broke off"
    )


# ---------------------------------------------------------------- commands


@pytest.mark.parametrize("more", [["--task", "digits", "--seed", "3", "--clip-norm", "2.0"], ["--no-gradients"]])
def test_the_command_for_another_split_does_the_run_again_with_it(
    tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--workers", "4", "--latency", "constant:1*slow:3=2", "--network", "bandwidth=1Gbps", "--updates", "5"]
    assert main(["simulate", *given, *more, "--batch-size", "8", "--out", str(tmp_path / "one"), "-q"]) == 0
    command = command_for(read_header(tmp_path / "one"), 3, 1)
    assert command is not None
    assert main([*shlex.split(command)[1:], "--out", str(tmp_path / "two"), "-q"]) == 0
    capsys.readouterr()
    one, two = read_header(tmp_path / "one"), read_header(tmp_path / "two")
    assert (two["policy"]["name"], two["policy"]["quorum"], two["policy"]["backups"]) == ("backup", 3, 1)
    same = (
        "engine",
        "task",
        "workers",
        "seed",
        "batch_size",
        "updates",
        "epochs",
        "until",
        "learning",
        "parameter_bytes",
    )
    assert {name: one[name] for name in same} == {name: two[name] for name in same}
    assert command_for(two, 3, 1) is None, "it has that split"


def test_other_engines_get_the_line_of_their_own() -> None:
    local = {**HEADER, "engine": {"name": "local", "latency": None, "faults": None}, "task": "my task.py:Mine"}
    assert (
        command_for(local, 3, 0)
        == "quorate train --task 'my task.py:Mine' --workers 3 --batch-size 10 --epochs 1 --seed 7"
    )
    collective = {**HEADER, "engine": {"name": "collective"}}
    assert command_for(collective, 4, 1) == "model = quorate.DataParallel(model, optimizer, quorate.BackupSync(4, 1))"
    assert command_for({**HEADER, "policy": {"name": "full-sync"}}, 3, 0) is None


def test_asynchronous_runs_of_equal_workers_are_even(tmp_path: Path) -> None:
    assert [one["kind"] for one in findings_of(write(tmp_path, asynchronous()))] == ["even"]


def test_cautions_of_the_planner_stand_before_any_figure_and_its_sentence_last(tmp_path: Path) -> None:
    choice = {"quorum": 2, "backups": 1, "sentence": "Take 2+1: 1 s an update.", "reason": "it is quicker"}
    plan = {"splits": [], "recommendation": choice, "cautions": ["8 workers shared 2 cores"], "run": 0}
    plan["splits"] = [{"quorum": 2, "backups": 1, "update_seconds": {}}]
    found = findings_of(write(tmp_path, rounds_of({0: 1.0, 1: 1.0, 2: 2.0})), plan=plan)
    assert [one["kind"] for one in found] == ["caution", "slow", "plan"]
    assert found[0]["text"] == "8 workers shared 2 cores."
    assert found[2]["text"] == "Take 2+1: 1 s an update." and "--workers 2+1" in found[2]["command"]


def test_on_shared_cores_no_worker_is_called_slow() -> None:
    found = [finding("slow", "Worker 3 is ×1.3 slow.", workers=[3]), finding("chance", "Another one each time.")]
    caution = "8 workers shared 2 cores"
    kept = {"quorum": 6, "backups": 2, "is_kept": True, "sentence": "Keep 6+2."}
    header = {"policy": {"name": "backup", "quorum": 6}, "workers": 8, "engine": {"name": "local"}}
    kinds = [one["kind"] for one in with_advice(found, {"cautions": [caution], "recommendation": kept}, header)]
    assert kinds == ["caution", "chance", "plan"]
    judged = {**kept, "is_kept": False}
    assert "slow" in [one["kind"] for one in with_advice(found, {"recommendation": judged}, header)]
