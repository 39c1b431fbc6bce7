"""`quorate demo`: short here; what it says follows from the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quorate.cli._demo_text import SameRate, sentences
from quorate.conditions import parse_until
from quorate.reporting.comparison import Row

from .conftest import Quorate

RUNS = ["full-sync", "backup", "async", "softsync"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.cli.demo.EPOCHS", 1)


@pytest.mark.usefixtures("short")
def test_the_demo_leaves_its_files_and_overwrites_only_those(quorate_command: Quorate, here: Path) -> None:
    ran = quorate_command("demo")
    assert ran.status == 0
    assert "No policy reached 95% test accuracy." in ran.out
    out = here / "demo"
    own = [*RUNS, "figure.png", "summary.json", "table.csv"]
    assert sorted(entry.name for entry in out.iterdir()) == sorted(own)
    assert quorate_command("replay", "demo/async").status == 0, "its own learning rate is found again"

    ran = quorate_command("demo")
    assert ran.status == 2
    assert "add --overwrite" in ran.err

    (out / "notes.txt").write_text("mine")
    (out / "backup" / "notes.txt").write_text("mine too")
    figure = (out / "figure.png").stat().st_mtime_ns
    digest = (out / "backup" / "summary.json").read_text()
    assert quorate_command("demo", "--overwrite").status == 0
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "backup" / "notes.txt").read_text() == "mine too"
    assert (out / "figure.png").stat().st_mtime_ns > figure
    assert (out / "backup" / "summary.json").read_text() == digest, "equal seeds, equal runs"


def test_overwriting_does_not_follow_links(here: Path) -> None:
    from quorate.cli._comparing import ComparisonFolder

    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "trace.jsonl").write_text("precious")
    (here / "demo").mkdir()
    (here / "demo" / "backup").symlink_to(elsewhere)
    ComparisonFolder(here / "demo", ["backup"]).clear()
    assert (elsewhere / "trace.jsonl").read_text() == "precious"


def row(name: str, label: str, seconds: float | None) -> Row:
    return Row(
        name=name,
        label=label,
        time_to_target_s=seconds,
        speed_up=None,
        measure="accuracy",
        final=0.9,
        best=0.92,
        updates=10,
        seconds=40.0,
        samples_per_s=1.0,
        staleness_mean=7.0,
        staleness_max=9,
        dropped_share=0.25,
        wasted_share=0.2,
        waiting_share=0.6,
        bytes_sent=1,
        bytes_used_share=1.0,
        broke_off=None,
    )


def test_the_sentences_follow_the_numbers_whoever_wins() -> None:
    target = parse_until("accuracy>=0.95")
    rates = {"full-sync": 0.1, "backup": 0.1, "async": 0.005, "softsync": 0.03}
    full, backup = row("full-sync", "full-sync 8", 9.6), row("backup", "backup 6+2", 3.2)
    stale = [row("async", "async 8, lr 0.005", None), row("softsync", "softsync 6/8, lr 0.03", 12.0)]
    at_once = [
        replace(row("async", "async 8", None), final=0.1),
        replace(stale[1], label="softsync 6/8", broke_off="x"),
    ]
    same = SameRate(0.1, 5, 0.8, at_once)
    first, learning, cost = sentences([full, backup, *stale], target, rates, same)
    assert first == (
        "backup 6+2 was the first to reach 95% test accuracy, after 3.2 s of virtual time; "
        "full-sync 8 took 9.6 s (×3.0), async 8 never did, softsync 6/8 took 12.0 s (×3.8)."
    )
    assert learning == (
        "Each ran at the learning rate that was best for it of those tried: full-sync 0.1, backup 0.1, async 0.005, "
        "softsync 0.03. At 0.1 and after 5 epochs, full-sync 8 is at 80%, async 8 at 10% and softsync 6/8 broke off: "
        "their gradients were 7.0 and 7.0 versions old on average."
    )
    assert cost.startswith("backup 6+2 dropped 25% of its tickets, and so 20% of its workers' time;")

    first, *_ = sentences([replace(full, time_to_target_s=1.0), backup, *stale], target, rates, same)
    assert first.startswith("full-sync 8 was the first") and "backup 6+2 took 3.2 s (×3.2)" in first
    winner = replace(stale[0], time_to_target_s=0.5)
    first, *_ = sentences([full, replace(backup, time_to_target_s=None), winner], target, rates, same)
    assert first.startswith("async 8 was the first")
    assert "full-sync 8 took 9.6 s (×19.2), backup 6+2 never did." in first
    nobody = [replace(one, time_to_target_s=None) for one in (full, backup, *stale)]
    assert sentences(nobody, target, rates, same)[0] == "No policy reached 95% test accuracy."
