"""The numbers of a report, against traces worked out by hand."""

from __future__ import annotations

import base64
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from quorate.errors import BadInput
from quorate.reporting.report.data import colours, labels, plan_for, planner_section, report_data, without_drawings
from quorate.reporting.report.slowness import Durations
from quorate.reporting.report.timeline import KINDS, Timeline
from quorate.reporting.report.trace_pass import find_runs, gather
from tests.reporting.traces import BACKUP, HEADER, asynchronous, write

PLAN: dict[str, Any] = {
    "machines": 4,
    "splits": [
        {
            **{"quorum": 4 - backups, "backups": backups, "updates": 1.0 + backups, "wasted": 0.1, "bytes": 5},
            "update_seconds": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "median": mean, "p99": 2 * mean},
            "time": mean * (1 + backups),
        }
        for backups, mean in ((1, 1.0), (0, 3.0))
    ],
    "recommendation": {
        **{"policy": "backup", "quorum": 3, "backups": 1, "seconds_per_update": 1.0, "time": 2.0, "speedup": 1.5},
        "reason": "the last gradient <b>costs</b> most",
    },
}


def data_of(*folders: Path, **more: Any) -> dict[str, Any]:
    return report_data([gather(folder) for folder in folders], **more)


def segments(timeline: dict[str, Any]) -> list[tuple[int, str, float, float]]:
    """(row, kind, start, end) of everything that is kept, unpacked again."""
    found = []
    for stretch in timeline["stretches"]:
        rows, kinds = base64.b64decode(stretch["rows"]), base64.b64decode(stretch["kinds"])
        starts, lengths = array("f"), array("f")
        starts.frombytes(base64.b64decode(stretch["starts"]))
        lengths.frombytes(base64.b64decode(stretch["lengths"]))
        for row, kind, start, length in zip(rows, kinds, starts, lengths, strict=True):
            found.append((row, KINDS[kind], stretch["from"] + start, stretch["from"] + start + length))
    return found


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = data_of(write(tmp_path / "run", BACKUP))["runs"][0]
    return found


def test_key_figures_and_drops(run: dict[str, Any]) -> None:
    assert (run["label"], run["end"], run["left_out"]) == ("backup 2+1", "data used up", None)
    summary = run["summary"]
    assert (summary["updates"], summary["seconds"]) == (3, 8.0)
    assert summary["tickets"]["reasons"] == {"late: its version is over": 2}
    assert (summary["tickets"]["lost"], summary["tickets"]["applied"]) == (1, 6)
    assert run["absent"] == {}


def test_curves_have_all_three_axes(run: dict[str, Any]) -> None:
    axes = {"time": [2.0, 4.0, 7.0], "updates": [1, 2, 3], "samples": [20, 40, 60]}
    assert run["loss"] == {**axes, "value": [4.0, 2.0, 1.0]}
    assert run["measures"] == {"accuracy": {**axes, "value": [0.25, 0.5, 0.75]}}


def test_time_to_the_kth_arrival(run: dict[str, Any]) -> None:
    arrivals = run["arrivals"]
    assert arrivals["rounds"] == 3
    assert arrivals["means"] == pytest.approx([1.0, 7 / 3])
    assert arrivals["counts"] == [3, 3]
    second = arrivals["chosen"][1]
    assert second["k"] == 2 and second["mean"] == pytest.approx(7 / 3)
    by_share = dict(zip(second["share"], second["seconds"], strict=True))
    assert by_share[0.5] == pytest.approx(2.0, rel=0.01)
    assert by_share[0.99] == pytest.approx(3.0, rel=0.01)


def test_rounds_that_ran_out_of_batches_are_left_out(tmp_path: Path) -> None:
    short = [*BACKUP[:20], {"event": "exhausted", "time": 4.0, "worker": 1}, *BACKUP[20:]]
    arrivals = data_of(write(tmp_path, short))["runs"][0]["arrivals"]
    assert (arrivals["rounds"], arrivals["short_rounds"]) == (2, 1)
    assert arrivals["means"] == pytest.approx([1.0, 2.0])


def test_timeline_knows_what_became_of_every_ticket(run: dict[str, Any]) -> None:
    timeline = run["timeline"]
    assert timeline["whole"] and timeline["rows"] == 3
    assert sorted(segments(timeline)) == [
        (0, "used", 0.0, 1.0),
        (0, "used", 2.0, 4.0),
        (0, "used", 4.0, 5.0),
        (1, "cancelled", 2.0, 4.0),
        (1, "gone", 4.5, 8.0),
        (1, "lost", 4.0, 4.5),
        (1, "used", 0.0, 2.0),
        (2, "cancelled", 0.0, 2.0),
        (2, "used", 2.0, 3.0),
        (2, "used", 4.0, 7.0),
    ]


def test_outline_adds_up_to_the_seconds_of_the_segments(run: dict[str, Any]) -> None:
    timeline = run["timeline"]
    outline = timeline["outline"]
    shares, bins = base64.b64decode(outline["shares"]), outline["bins"]
    for kind_index, kind in enumerate(outline["kinds"]):
        for row in range(3):
            start = (kind_index * 3 + row) * bins
            seconds = sum(shares[start : start + bins]) / 255 * outline["width_s"]
            wanted = sum(end - begin for at, what, begin, end in segments(timeline) if (at, what) == (row, kind))
            assert seconds == pytest.approx(wanted, abs=2 * outline["width_s"]), (kind, row)


def test_slow_worker_and_its_part_are_named(run: dict[str, Any]) -> None:
    rows = {row["worker"]: row for row in run["worker_rows"]}
    assert run["worker_rows"][0]["worker"] == 2
    # Cancelled after 2 s counts as longer than 2 s: its two arrivals after 1 and 3 s alone would have a median of 1.
    assert rows[2]["median_s"] == pytest.approx(3.0, rel=0.01)
    assert rows[2]["slowness"] == pytest.approx(1.5, rel=0.02)
    assert rows[2]["slow_in"] == "compute"
    assert rows[2]["parts_s"] == pytest.approx({"data": 0.125, "compute": 2.5, "transfer": 0.0625})
    assert rows[0]["slow_in"] is None
    assert (rows[1]["lost"], rows[1]["dropped"], rows[1]["applied"]) == (1, 1, 1)


def test_bytes(run: dict[str, Any]) -> None:
    # Nine tickets read a version, six gradients came back; a version and a gradient of each of the six were used.
    assert run["summary"]["bytes"] == {"sent": 1500, "used": 1200, "wasted": 300}


def test_async_has_no_rounds_and_says_so(tmp_path: Path) -> None:
    run = data_of(write(tmp_path, asynchronous()))["runs"][0]
    assert run["arrivals"] is None and run["loss"] is None and run["measures"] == {}
    assert "no rounds" in run["absent"]["arrivals"]
    assert "gradients were not computed" in run["absent"]["learning"]
    assert "network" in run["absent"]["parts"]
    assert [bar["tickets"] for bar in run["staleness"]] == [1, 39]


def test_torn_trace_is_shown_as_far_as_it_is_whole(tmp_path: Path) -> None:
    folder = write(tmp_path, BACKUP[:14])
    with (folder / "trace.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event":"arrive","ti')
    run = data_of(folder)["runs"][0]
    assert run["end"] is None
    assert "torn at line 15" in run["left_out"]
    assert run["summary"]["updates"] == 1
    assert run["timeline"]["seconds"] == 2.0


def test_trace_that_does_not_hang_together_names_the_line(tmp_path: Path) -> None:
    folder = write(tmp_path, [record for record in BACKUP if record["event"] != "start"])
    with pytest.raises(BadInput, match="damaged at line 5; give it as quorate wrote it"):
        gather(folder)


def test_header_alone(tmp_path: Path) -> None:
    run = data_of(write(tmp_path, [HEADER]))["runs"][0]
    assert "no update" in run["absent"]["updates"]


def test_choices_of_an_adaptive_policy(tmp_path: Path) -> None:
    choices = [
        {"event": "choose", "time": 0.0, "version": 0, "quorum": 2, "reason": "to begin with"},
        {"event": "choose", "time": 0.0, "version": 0, "quorum": 2, "reason": "as before"},
        {"event": "choose", "time": 0.0, "version": 1, "quorum": 1, "reason": "the second is slow"},
    ]
    found = data_of(write(tmp_path, [*BACKUP[:4], *choices, *BACKUP[4:]]))["runs"][0]["choices"]
    assert found["count"] == 3
    assert [(change["version"], change["quorum"]) for change in found["changes"]] == [(0, 2), (1, 1)]


def test_plan_is_sorted_by_backups() -> None:
    section = planner_section(PLAN)
    assert section is not None
    assert section["backups"] == [0, 1] and section["mean"] == [3.0, 1.0] and section["time"] == [3.0, 2.0]
    assert section["choice"]["quorum"] == 3
    assert planner_section(None) is None


def test_plan_is_made_from_the_run_that_waits_for_everybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import quorate.planning

    full = {**HEADER, "policy": {"name": "full-sync"}}
    runs = [gather(write(tmp_path / "one", BACKUP)), gather(write(tmp_path / "two", [full, *BACKUP[1:]]))]
    nothing, why = plan_for(runs)
    assert nothing is None and why is not None and "too few" in why and "two" in why

    class Made:
        def as_dict(self) -> dict[str, Any]:
            return PLAN

    asked: list[Path] = []
    monkeypatch.setattr(quorate.planning, "plan", lambda path: asked.append(path) or Made())
    made, why = plan_for(runs)
    assert asked == [tmp_path / "two"] and why is None
    assert made is not None and made["run"] == 1
    assert report_data(runs, plan=made)["plan"]["run"] == 1


def test_everything_is_json_without_nan(tmp_path: Path) -> None:
    broken = [dict(record) for record in BACKUP]
    for record in broken:
        if record["event"] == "evaluate":
            record["measures"] = {"accuracy": float("nan")}
    data = data_of(write(tmp_path, broken), plan=PLAN)
    assert data["runs"][0]["measures"]["accuracy"]["value"] == [None, None, None]
    json.dumps(data, allow_nan=False)
    assert "stretches" not in without_drawings(data)["runs"][0]["timeline"]


def test_target_must_be_measured(tmp_path: Path) -> None:
    from quorate.stopping import parse_until

    run = write(tmp_path, BACKUP)
    assert data_of(run, target=parse_until("accuracy>=0.5"))["comparison"][0]["time_to_target_s"] == 4.0
    with pytest.raises(BadInput, match="choose one of: accuracy"):
        data_of(run, target=parse_until("speed>=0.5"))


# ---------------------------------------------------------------- parts


def test_durations_without_cuts_are_plain_quantiles() -> None:
    times = Durations(bins_per_e=1000)
    for value in range(1, 101):
        times.add(float(value))
    assert times.quantiles((0.1, 0.5, 0.9, 1.0)) == pytest.approx([10, 50, 90, 100], rel=1e-3)
    assert times.mean_s == pytest.approx(50.5)


def test_durations_that_are_mostly_cut_have_no_median() -> None:
    times = Durations()
    times.add(1.0)
    for _ in range(9):
        times.add_cut(2.0)
    assert times.quantiles((0.05, 0.5)) == [pytest.approx(1.0, rel=0.01), None]
    assert times.longest_s == pytest.approx(2.0, rel=0.01)


def test_long_runs_keep_beginning_end_and_slowest_stretch() -> None:
    timeline = Timeline(workers=10, most_segments=20_000)
    time = 0.0
    for version in range(10_000):
        took = 50.0 if version == 5_000 else 1.0
        for worker in range(10):
            timeline.add(worker, 0, time, time + took)
        time += took
        if timeline.updated(time):
            timeline.close(time)
    timeline.close(time)
    data = timeline.data(time)
    assert not data["whole"]
    assert data["segments"] <= 25_000
    spans = [(stretch["from"], stretch["to"]) for stretch in data["stretches"]]
    assert spans[0][0] == 0.0 and spans[-1][1] == time
    assert any(start <= 5_000 <= end for start, end in spans)
    slowest = next(moment for moment in data["moments"] if "slowest" in moment["name"])
    assert slowest["from"] <= 5_000.0 and slowest["to"] >= 5_050.0 and "5001" in slowest["name"]


def test_many_workers_share_rows() -> None:
    timeline = Timeline(workers=1000, most_segments=20_000)
    for worker in range(1000):
        timeline.add(worker, 0, 0.0, 1.0)
    timeline.updated(1.0)
    timeline.close(1.0)
    data = timeline.data(1.0)
    assert (data["rows"], data["workers_per_row"], data["segments"]) == (250, 4, 0)
    assert set(base64.b64decode(data["outline"]["shares"])[: data["outline"]["bins"] - 1]) == {255}


def test_runs_of_one_policy_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b" / "trace.jsonl", tmp_path / "other" / "b"]
    names = labels([HEADER] * 3, paths)
    assert names[0] == "backup 2+1 (a)" and len(set(names)) == 3
    looks = colours([HEADER] * 9)
    assert len({(look["colour"], look["dashed"]) for look in looks}) == 9
    other = {**HEADER, "policy": {"name": "async"}}
    assert colours([HEADER, HEADER, other])[2] == colours([other])[0]


def test_a_folder_of_several_runs_is_all_of_them_in_its_order(tmp_path: Path) -> None:
    for name in ("async", "backup"):
        write(tmp_path / name, BACKUP)
    assert [path.name for path in find_runs([tmp_path])] == ["async", "backup"]
    (tmp_path / "summary.json").write_text('{"runs": {"backup": {}, "async": {}}}', encoding="utf-8")
    assert [path.name for path in find_runs([tmp_path])] == ["backup", "async"]
