"""`quorate report`: what is written where, and what bad input gets."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

from quorate.reporting.report.exports import MARK
from tests.cli.conftest import Quorate
from tests.reporting.traces import BACKUP, write


@pytest.fixture
def run(here: Path) -> Path:
    return write(here / "run", BACKUP)


def test_page_goes_into_the_folder_of_the_run(quorate_command: Quorate, run: Path, here: Path) -> None:
    for given in ("run", "run/trace.jsonl"):  # the second replaces a page of ours without being asked
        ran = quorate_command("report", given)
        assert (ran.status, ran.err) == (0, "") and "report.html" in ran.out
        assert MARK in (run / "report.html").read_text(encoding="utf-8")
    assert not (here / "report.html").exists()


def test_page_of_several_goes_here(quorate_command: Quorate, run: Path, here: Path) -> None:
    write(here / "other", BACKUP)
    assert quorate_command("report", "run", "other").status == 0
    assert (here / "report.html").is_file() and not (run / "report.html").exists()


def test_json_is_the_data_alone(quorate_command: Quorate, run: Path) -> None:
    data = quorate_command("report", "run", "--json", "--target", "accuracy>=0.5").json()
    assert data["runs"][0]["summary"]["updates"] == 3
    assert data["comparison"][0]["time_to_target_s"] == 4.0
    assert not (run / "report.html").exists()


def test_figures_and_tensorboard(quorate_command: Quorate, run: Path, here: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; it is in the dev extra")
    ran = quorate_command("report", "run", "--figures", "figures", "--tensorboard", "events")
    assert ran.status == 0, ran.err
    assert (here / "figures" / "timeline.png").is_file() and (here / "figures" / "timeline.csv").is_file()
    assert list((here / "events").rglob("events.out.tfevents.*"))


def test_page_can_be_opened(quorate_command: Quorate, run: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    assert quorate_command("report", "run", "--open", "--out", "page.html").status == 0
    assert opened == [(here / "page.html").as_uri()]


def test_torn_trace_is_reported_with_a_note(quorate_command: Quorate, here: Path) -> None:
    write(here / "torn", BACKUP[:14])
    ran = quorate_command("report", "torn")
    assert ran.status == 0
    assert ran.err.startswith("note: torn: trace.jsonl stops at line 14")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "does not exist"),
        (["empty"], "holds no run"),
        (["foreign.txt"], "is not a quorate trace"),
        (["nothing.jsonl"], "is empty"),
        (["old.jsonl"], "has schema 0"),
        (["run", "run/trace.jsonl"], "given twice"),
        (["run", "--out", "mine.html"], "is no report; name another file, or add --overwrite"),
        (["run", "--out", "empty"], "which is a folder"),
        (["run", "--out", "no/page.html"], "does not exist; make it first"),
        (["run", "--target", "speed>=1"], "no run measures 'speed'; choose one of: accuracy"),
        (["run", "--target", "fast"], "is not understood"),
        (["run", "--figures", "mine.html"], "figures is 'mine.html', which is a file"),
        (["run", "--tensorboard", "mine.html"], "tensorboard is 'mine.html', which is a file"),
        (["run", "--json", "--open"], "add --out FILE"),
        ([], "Missing argument"),
    ],
)
def test_bad_input_gets_one_sentence(
    quorate_command: Quorate, run: Path, here: Path, arguments: list[str], sentence: str
) -> None:
    (here / "empty").mkdir()
    (here / "foreign.txt").write_text("hello\n", encoding="utf-8")
    (here / "nothing.jsonl").write_text("", encoding="utf-8")
    (here / "old.jsonl").write_text(json.dumps({**BACKUP[0], "schema": 0}) + "\n", encoding="utf-8")
    (here / "mine.html").write_text("<p>mine</p>", encoding="utf-8")
    ran = quorate_command("report", *arguments)
    assert ran.status == 2
    assert sentence in ran.err and ran.err.count("\n") == 1
    assert not (run / "report.html").exists()
    assert (here / "mine.html").read_text(encoding="utf-8") == "<p>mine</p>"


def test_what_is_there_is_replaced_when_asked(quorate_command: Quorate, run: Path, here: Path) -> None:
    (here / "mine.html").write_text("<p>mine</p>", encoding="utf-8")
    assert quorate_command("report", "run", "--out", "mine.html", "--overwrite").status == 0
    assert MARK in (here / "mine.html").read_text(encoding="utf-8")


def test_too_many_runs(quorate_command: Quorate, here: Path) -> None:
    for number in range(17):
        write(here / "many" / str(number), BACKUP)
    ran = quorate_command("report", "many")
    assert ran.status == 2 and "at most 16" in ran.err


def test_the_trace_itself_is_never_replaced(quorate_command: Quorate, run: Path, here: Path) -> None:
    before = (run / "trace.jsonl").read_bytes()
    (here / "link.html").symlink_to(run / "trace.jsonl")
    for out in ("run/trace.jsonl", "link.html"):
        ran = quorate_command("report", "run", "--out", out, "--overwrite")
        assert ran.status == 2 and "which is to be shown; name another file" in ran.err
    assert (run / "trace.jsonl").read_bytes() == before


def test_figures_in_the_way_are_noticed_before_the_page_is_written(
    quorate_command: Quorate, run: Path, here: Path
) -> None:
    assert quorate_command("report", "run", "--figures", "figures", "--out", "one.html").status == 0
    ran = quorate_command("report", "run", "--figures", "figures", "--out", "two.html")
    assert ran.status == 2 and "is there already; name another folder, or add --overwrite" in ran.err
    assert not (here / "two.html").exists()


def test_a_run_that_is_not_there_is_named_rather_than_the_folder_of_its_page(quorate_command: Quorate) -> None:
    ran = quorate_command("report", "rnus/1")
    assert (ran.status, ran.out, ran.err) == (2, "", "error: run 'rnus/1' does not exist; check the path\n")
