"""`quorate demo`: short here; what it says follows from the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quorate.cli._demo_text import sentences
from quorate.reporting.comparison import Row
from quorate.training import parse_until

from .conftest import Quorate

RUNS = ["full-sync", "backup", "async", "softsync", "async-lr-0.007", "softsync-lr-0.03"]


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
    assert quorate_command("replay", "demo/async-lr-0.007").status == 0, "its own learning rate is found again"

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
    full, backup = row("full-sync", "full-sync 8", 9.6), row("backup", "backup 6+2", 3.2)
    async_, soft = row("async", "async 8", None), row("softsync", "softsync 6/8", 12.0)
    gentle = row("async-lr-0.007", "async 8, lr 0.007", 7.0)
    first, stale, cost = sentences([full, backup, async_, soft, gentle], target, 0.1)
    assert first == (
        "backup 6+2 was the first to reach 95% test accuracy, after 3.2 s of virtual time; "
        "full-sync 8 took 9.6 s (×3.0)."
    )
    assert "async 8 (mean staleness 7.0) never reached it (best 92%, at the end 90%)" in stale
    assert "softsync 6/8 (mean staleness 7.0) reached it in 12.0 s" in stale
    assert "async 8, lr 0.007 reached it in 7.0 s" in stale
    assert cost.startswith("backup 6+2 dropped 25% of its tickets, and so 20% of its workers' time;")

    first, *_ = sentences([replace(full, time_to_target_s=1.0), backup, async_, soft, gentle], target, 0.1)
    assert first.startswith("full-sync 8 was the first") and "backup 6+2 took 3.2 s (×3.2)." in first
    winner = replace(gentle, time_to_target_s=0.5)
    first, *_ = sentences([full, replace(backup, time_to_target_s=None), async_, soft, winner], target, 0.1)
    assert first.startswith("async 8, lr 0.007 was the first")
    assert "backup 6+2 never did and full-sync 8 took 9.6 s (×19.2)." in first
