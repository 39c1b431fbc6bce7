"""`quorate demo`: short here; what it says follows from the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from quorate.cli.demo import SameRate, sentences
from quorate.reporting.comparison import Row
from quorate.stopping import parse_until

from .conftest import Quorate

RUNS = ["full-sync", "backup", "async", "softsync"]


@pytest.mark.usefixtures("warm")
def test_the_demo_leaves_its_files_and_overwrites_only_those(
    quorate_command: Quorate, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quorate.cli.demo.EPOCHS", 1)
    out = here / "demo"
    (out / "backup" / "checkpoints" / "00000007").mkdir(parents=True)
    earlier = [
        out / "backup" / name
        for name in ("trace.jsonl", "summary.json", "parameters.safetensors", "checkpoints/00000007/state.json")
    ]
    for file in (*earlier, out / "figure.png"):
        file.write_text("of an earlier demo")
    mine = [out / "notes.txt", out / "backup" / "notes.txt"]
    for file in mine:
        file.write_text("mine")
    ran = quorate_command("demo")
    assert ran.status == 2
    assert "add --overwrite" in ran.err
    assert all(file.read_text() == "of an earlier demo" for file in earlier)

    ran = quorate_command("demo", "--overwrite")
    assert ran.status == 0, ran.err
    assert ran.out.startswith("8 worker processes, real seconds; artificial delays")
    assert "No policy reached 95% test accuracy." in ran.out
    own = [*RUNS, "figure.png", "summary.json", "table.csv"]
    assert sorted(entry.name for entry in out.iterdir()) == sorted([*own, "notes.txt"])
    assert all(file.read_text() == "mine" for file in mine)
    assert not (out / "backup" / "checkpoints" / "00000007").exists()
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert quorate_command("replay", "demo/async").status == 0, "its own learning rate is found again"


def test_overwriting_does_not_follow_links(here: Path) -> None:
    from quorate.cli.compare import ComparisonFolder

    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "trace.jsonl").write_text("precious")
    (here / "demo").mkdir()
    (here / "demo" / "backup").symlink_to(elsewhere)
    (elsewhere / "checkpoints" / "00000001").mkdir(parents=True)
    (elsewhere / "checkpoints" / "00000001" / "state.json").write_text("precious")
    ComparisonFolder(here / "demo", ["backup"]).clear()
    assert (elsewhere / "trace.jsonl").read_text() == "precious"
    assert (elsewhere / "checkpoints" / "00000001" / "state.json").read_text() == "precious"


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
    same = SameRate(0.1, 5, 0.8, replace(row("async", "async 8, lr 0.1", None), final=0.1))
    first, learning, cost = sentences([full, backup, *stale], target, rates, same)
    assert first == (
        "backup 6+2 was the first to reach 95% test accuracy, after 3.2 s; "
        "full-sync 8 took 9.6 s (×3.0), async 8 never did, softsync 6/8 took 12.0 s (×3.8)."
    )
    assert learning == (
        "Each ran at the learning rate that was best for it of those tried: full-sync 0.1, backup 0.1, async 0.005, "
        "softsync 0.03. At 0.1 and after 5 epochs, full-sync 8 is at 80%, async 8 at 10%; "
        "its gradients were 7.0 versions old on average."
    )
    assert cost.startswith("backup 6+2 dropped 25% of its tickets, and so 20% of its workers' time;")

    broken = same._replace(stale=replace(same.stale, broke_off="x"))
    assert "async 8 broke off; its" in sentences([full, backup, *stale], target, rates, broken)[1]

    first, *_ = sentences([replace(full, time_to_target_s=1.0), backup, *stale], target, rates, same)
    assert first.startswith("full-sync 8 was the first") and "backup 6+2 took 3.2 s (×3.2)" in first
    winner = replace(stale[0], time_to_target_s=0.5)
    first, *_ = sentences([full, replace(backup, time_to_target_s=None), winner], target, rates, same)
    assert first.startswith("async 8 was the first")
    assert "full-sync 8 took 9.6 s (×19.2), backup 6+2 never did." in first
    nobody = [replace(one, time_to_target_s=None) for one in (full, backup, *stale)]
    assert sentences(nobody, target, rates, same)[0] == "No policy reached 95% test accuracy."
