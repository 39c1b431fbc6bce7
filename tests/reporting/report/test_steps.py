"""`quorate report times.csv`: step times of a script that quorate did not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quorate.cli import main
from quorate.reporting.report.trace_pass import gather_steps
from tests.browser import DESK, PHONE, open_page
from tests.reporting.traces import BACKUP, write

from .test_page import ready

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PHASES = {"data": 0.01, "forward": 0.02, "backward": 0.06, "optimizer": 0.01}


def table(path: Path, workers: int = 4, steps: int = 60, first: int = 7, phases: bool = True) -> Path:
    """A step of worker 3 takes 0.22 s, for its backward pass; of the others 0.1 s. The all-reduce takes 0.03 s."""
    lines = ["step,worker,seconds" + (",data,forward,backward,optimizer,waiting" if phases else "")]
    for step in range(first, first + steps):
        for worker in range(workers):
            parts = {**PHASES, "backward": 0.18} if worker == 3 else PHASES
            cells = [step, worker, round(sum(parts.values()) * (1 + 0.001 * (step % 3)), 6)]
            waiting = 0.03 + (0.0 if worker == 3 else 0.12)
            lines.append(",".join(map(str, [*cells, *((*parts.values(), waiting) if phases else ())])))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def report_of(*files: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["report", *map(str, files), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_who_is_slow_in_which_phase_and_what_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = table(tmp_path / "times.csv")
    data = report_of(file, capsys=capsys)
    run = data["runs"][0]
    slow, plan = run["findings"]
    assert slow["text"].startswith(
        "Worker 3 is ×2.2 slow in the backward pass: 220 ms a gradient, the usual worker takes"
    )
    assert (
        "Waiting for it costs 7.21 s, 48% of the run. Without it, an update takes 130 ms instead of 250" in slow["text"]
    )
    assert slow["command"] == f"quorate plan {file} --what-if without=3"
    assert plan["kind"] == "plan" and plan["text"].startswith("Take 3+1")
    assert plan["command"] == "model = quorate.DataParallel(model, optimizer, quorate.BackupSync(3, 1))"
    assert run["arrivals"]["means"] == pytest.approx([0.1001, 0.1001, 0.1001, 0.22022])
    assert data["plan"]["backups"] == [0, 1, 2, 3] and None not in data["plan"]["low"] + data["plan"]["high"]


def test_parts_of_every_worker_are_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = table(tmp_path / "times.csv", phases=False).read_text().splitlines()
    files = []
    for worker in range(4):
        files.append(tmp_path / f"times.worker{worker}.csv")
        rows = [line for line in whole[1:] if line.split(",")[1] == str(worker)]
        files[-1].write_text("\n".join([whole[0], *rows]) + "\n")
    run = report_of(*files, capsys=capsys)["runs"][0]
    caution, slow, _ = run["findings"]
    assert caution["text"].startswith("The all-reduce is not in the table")
    assert run["workers"] == 4 and slow["workers"] == [3]
    assert slow["command"] == f"quorate plan {' '.join(map(str, files))} --what-if without=3"
    assert "no columns of phases" in run["absent"]["parts"]


def test_heat_map_has_a_cell_for_every_worker_and_step(tmp_path: Path) -> None:
    gathered = gather_steps([table(tmp_path / "times.csv")])
    heat = gathered.gatherer.heat.data(0.1)
    assert heat is not None and (heat["rows"], heat["columns"], heat["versions"]) == (4, 60, 1)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_page_has_its_three_pictures(
    tmp_path: Path, browser: Browser, size: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    file = table(tmp_path / "times.csv", workers=8)
    assert main(["report", str(file)]) == 0
    assert "times.html: the report" in capsys.readouterr().out
    with open_page(browser, (tmp_path / "times.html").as_uri(), size) as (page, asked):
        ready(page)
        assert page.locator("h1").inner_text() == "times.csv"
        assert (
            page.locator("#findings > div").first.inner_text().startswith("Worker 3 is ×2.2 slow in the backward pass")
        )
        assert page.locator("#arrivals .uplot").count() == 2
        assert page.locator("#workers .heat canvas").count() == 1
        assert page.locator("#plan .uplot").count() == 2
        bands = (
            "[...CHARTS].filter((one) => one.plot && one.holder.closest('#plan')).map((one) => one.plot.bands.length)"
        )
        assert page.evaluate(bands) == [1, 1]
        assert page.locator("#learning, #staleness, #bytes").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        if size is DESK:
            cut = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth).length"
            assert page.evaluate(cut) == 0
        assert asked == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory; check the path"),
        ("step,worker\n1,2\n", "column seconds is missing"),
        ("step,worker,seconds\n", "there is no step in it"),
        ("step,worker,seconds\n0,0,1\n1,0,1\n", "one worker waits for nobody"),
    ],
)
def test_what_is_no_table_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    file = tmp_path / "times.csv"
    if content is not None:
        file.write_text(content)
    assert main(["report", str(file)]) == 2
    printed = capsys.readouterr()
    assert words in printed.err and len(printed.err.splitlines()) == 1
    assert not (tmp_path / "times.html").exists()


def test_runs_and_tables_do_not_share_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = table(tmp_path / "times.csv"), write(tmp_path / "run", BACKUP)
    assert main(["report", str(file), str(run)]) == 2
    assert "runs and step times (CSV) are given together; make a page of each" in capsys.readouterr().err
    before = file.read_bytes()
    assert main(["report", str(file), "--out", str(file), "--overwrite"]) == 2
    assert "name another file for the page" in capsys.readouterr().err and file.read_bytes() == before
