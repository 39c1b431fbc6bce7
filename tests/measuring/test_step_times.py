"""Reading tables of step times: what is forgiven, what is left out, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from quorate.errors import BadInput
from quorate.latency.step_times import read_step_times

GOOD = "step,worker,seconds\n0,0,0.5\n0,1,0.6\n1,0,0.4\n1,1,0.7\n"


def written(folder: Path, text: str, name: str = "times.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def table(rows: dict[tuple[int, int], float]) -> str:
    return "step,worker,seconds\n" + "".join(f"{step},{worker},{value}\n" for (step, worker), value in rows.items())


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "\ufeff" + GOOD,
        GOOD.replace("\n", "\r\n"),
        " Step , WORKER, seconds \n0, 0, 0.5\n0 ,1 , 0.6\n\n1,0,4e-1\n1,1,.7\n",
        "seconds,host,worker,step\n0.5,a,0,0\n0.6,b,1,0\n0.4,a,0,1.0\n0.7,b,1,1\n",
        "step,worker,seconds\n1,1,0.7\n1,0,0.4\n0,1,0.6\n0,0,0.5\n",
        '"step","worker","seconds"\n0,0,"0.5"\n0,1,0.6\n1,0,0.4\n1,1,0.7\n',
    ],
)
def test_forms_of_one_table(tmp_path: Path, text: str) -> None:
    found = read_step_times([written(tmp_path, text)])
    assert found.times == {0: {0: 0.5, 1: 0.6}, 1: {0: 0.4, 1: 0.7}}
    assert list(found.times) == [0, 1]
    assert found.notes == []
    assert found.workers == [0, 1]


def test_parts_of_several_workers_make_one_table(tmp_path: Path) -> None:
    first = written(tmp_path, "step,worker,seconds\n0,0,0.5\n1,0,0.4\n", "a.csv")
    second = written(tmp_path, "step,worker,seconds\n0,1,0.6\n1,1,0.7\n", "b.csv")
    assert read_step_times([second, first]).times == {0: {0: 0.5, 1: 0.6}, 1: {0: 0.4, 1: 0.7}}


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_file_that_is_cut_gives_what_is_whole(tmp_path: Path, cut: int) -> None:
    rows = {(step, worker): 0.125 for step in range(30) for worker in range(3)}
    found = read_step_times([written(tmp_path, table(rows)[:-cut])])
    assert sorted(found.times) == list(range(29))
    assert "the last line has no end" in found.notes[0]
    assert found.notes[1] == "1 step was left out, as rows of some workers are missing in it"


def test_a_cluster_that_shrinks_is_kept_and_said(tmp_path: Path) -> None:
    rows = {(step, worker): 1.0 for step in range(40) for worker in range(4 if step < 20 else 3)}
    found = read_step_times([written(tmp_path, table(rows))])
    assert len(found.times) == 40
    assert found.notes == ["the number of workers changes during the run: 3, 4"]


def test_rows_that_are_missing_here_and_there_cost_their_steps(tmp_path: Path) -> None:
    rows = {
        (step, worker): 1.0 for step in range(100) for worker in range(4) if (step, worker) not in {(7, 1), (50, 3)}
    }
    found = read_step_times([written(tmp_path, table(rows))])
    assert len(found.times) == 98
    assert found.notes == ["2 steps were left out, as rows of some workers are missing in them"]


def test_warm_up_is_left_out(tmp_path: Path) -> None:
    slow = {(0, 0): 40.0, (1, 1): 3.1, (2, 0): 2.9, (20, 0): 40.0}
    rows = {(step, worker): slow.get((step, worker), 1.0) for step in range(30) for worker in range(2)}
    found = read_step_times([written(tmp_path, table(rows))])
    assert min(found.times) == 2
    assert found.times[20][0] == 40.0
    assert found.notes == ["the first 2 steps were left out as warm-up (over 3 × a worker's median)"]


def test_no_more_than_ten_steps_are_warm_up(tmp_path: Path) -> None:
    rows = {(step, worker): 9.0 if step < 14 else 1.0 for step in range(60) for worker in range(2)}
    assert min(read_step_times([written(tmp_path, table(rows))]).times) == 10


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; give a CSV with the columns step, worker, seconds"),
        ("\n \n", "is empty"),
        ("step,worker,seconds\n", r"there is no step in it; rows look like 0,3,0\.125"),
        ("step,rank,time\n0,0,1\n", r"column worker and seconds is missing \(there are: step, rank, time\)"),
        ("0,0,0.5\n0,1,0.6\n", "the first line must name the columns step, worker, seconds, separated by commas"),
        ("step;worker;seconds\n0;0;1\n", "separated by commas"),
        (
            "step,worker,seconds\n0,0,0.5\n0,1,fast\n",
            "line 3: seconds is 'fast', but it must be a finite number above 0",
        ),
        ("step,worker,seconds\n0,0,-0.5\n", "line 2: seconds is '-0.5'"),
        ("step,worker,seconds\n0,0,0\n", "line 2: seconds is '0'"),
        ("step,worker,seconds\n0,0,nan\n", "line 2: seconds is 'nan'"),
        ("step,worker,seconds\n0,0,inf\n", "line 2: seconds is 'inf'"),
        ("step,worker,seconds\n0,0,1e300\n", "line 2: seconds is '1e300'"),
        ("step,worker,seconds\n0,node3,1\n", "line 2: worker is 'node3', but it must be a whole number"),
        ("step,worker,seconds\n1.5,0,1\n", "line 2: step is '1.5'"),
        ("step,worker,seconds\n-1,0,1\n", "line 2: step is '-1'"),
        ("step,worker,seconds\n1e999,0,1\n", "line 2: step is '1e999'"),
        ("step,worker,seconds\n\n0,0\n", "line 3: only 2 cells, but the header has 3"),
        ("step,worker,seconds\n0,0,1\n0,0,2\n", "line 3: step 0 of worker 0 was there before"),
        ("step,worker,seconds\n0,4,1\n1,4,2\n", "all rows are of worker 4, and one worker waits for nobody"),
        ("step,worker,seconds\n0,0,1\n1,1,2\n", "no step has the times of two workers"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        read_step_times([written(tmp_path, text)])


def test_what_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no file of step times is given"):
        read_step_times([])
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_step_times([tmp_path / "nowhere.csv"])
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        read_step_times([tmp_path])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(BadInput, match="is not a text file"):
        read_step_times([tmp_path / "bytes"])
    same = written(tmp_path, GOOD)
    with pytest.raises(BadInput, match="give each run's file once"):
        read_step_times([same, same])
