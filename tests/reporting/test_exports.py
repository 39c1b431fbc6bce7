"""Figures as PNG and CSV, and the curves for TensorBoard."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from quorate.errors import BadInput
from quorate.reporting.figures import MissingLibrary
from quorate.reporting.report import exports
from quorate.reporting.report.data import report_data
from quorate.reporting.report.exports import slug, write_figures
from quorate.reporting.report.trace_pass import gather
from tests.reporting.report.test_data import PLAN
from tests.reporting.traces import BACKUP, asynchronous, write

CHOICE = {"event": "choose", "time": 0.0, "version": 0, "quorum": 2, "reason": "to begin with"}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    one = write(tmp_path / "one", [*BACKUP[:4], CHOICE, *BACKUP[4:]])
    two = write(tmp_path / "two", asynchronous())
    return report_data([gather(one), gather(two)], plan=PLAN)


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def test_every_figure_is_a_picture_and_a_table(data: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    files = write_figures(data, folder, overwrite=False)
    names = {file.stem for file in files}
    assert names == {
        *("measure-accuracy", "loss", "arrivals-cdf", "arrivals-mean", "timeline", "workers", "staleness", "bytes"),
        *("choices", "plan"),
    }
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert rows(folder / f"{name}.csv")
    assert [(row["time_s"], row["value"]) for row in rows(folder / "loss.csv")] == [
        ("2.0", "4.0"),
        ("4.0", "2.0"),
        ("7.0", "1.0"),
    ]
    assert [row["mean_s"][:5] for row in rows(folder / "arrivals-mean.csv")] == ["1.0", "2.333"]
    assert rows(folder / "workers.csv")[0]["slow_in"] == "compute"
    assert [row["backups"] for row in rows(folder / "plan.csv")] == ["0", "1"]


def test_splits_that_cannot_be_judged_are_not_exported(tmp_path: Path) -> None:
    plan = {**PLAN, "recommendation": {**PLAN["recommendation"], "is_kept": True}}
    data = report_data([gather(write(tmp_path / "run", BACKUP))], plan=plan)
    assert "plan" not in {file.stem for file in write_figures(data, tmp_path / "figures", overwrite=False)}


def test_files_that_are_there_are_kept(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "loss.csv").write_text("mine", encoding="utf-8")
    with pytest.raises(BadInput, match="--overwrite"):
        write_figures(data, tmp_path, overwrite=False)
    assert (tmp_path / "loss.csv").read_text(encoding="utf-8") == "mine"
    write_figures(data, tmp_path, overwrite=True)
    assert len(rows(tmp_path / "loss.csv")) == 3


def test_measures_with_odd_names_stay_in_the_folder(tmp_path: Path) -> None:
    odd = [dict(record) for record in BACKUP]
    for record in odd:
        if record["event"] == "evaluate":
            record["measures"] = {"../../$x_{": 1.0, "..\\..:$x_{": 2.0}
    data = report_data([gather(write(tmp_path / "run", odd))])
    files = write_figures(data, tmp_path / "figures", overwrite=False)
    assert all(file.resolve().parent == (tmp_path / "figures").resolve() for file in files)
    assert len({file.name for file in files if file.name.startswith("measure-")}) == 4
    assert slug("...") == "unnamed"


def test_tensorboard_has_the_curves(data: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed; it is in the dev extra")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # the second time replaces what the first wrote
        names = exports.write_events(data, tmp_path / "events")
    assert names == ["backup-2-1", "async-2"]
    found = EventAccumulator(str(tmp_path / "events" / "backup-2-1"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "measures/accuracy", "quorum"}
    assert [(event.wall_time, event.step, event.value) for event in found.Scalars("loss")] == [
        (2.0, 1, 4.0),
        (4.0, 2, 2.0),
        (7.0, 3, 1.0),
    ]
    assert len(list((tmp_path / "events" / "backup-2-1").iterdir())) == 1


def test_without_tensorboard_there_is_a_line_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(exports, "find_spec", lambda name: None)
    with pytest.raises(MissingLibrary, match=r"pip install 'quorate\[tensorboard\]'"):
        exports.write_events({"runs": []}, tmp_path)
