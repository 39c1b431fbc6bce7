"""`quorate plan` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quorate.cli import main
from tests.planning.worlds import record

PAPER = "50:137.5,70:99.8,80:91.1,90:82.5,100:76.2"


def test_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--latency", "chen2016", "--machines", "100", "--iterations", PAPER]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Take 96+4" in said and "38.0 h to the target against 55.5 h" in said and "×1.46" in said
    assert "It would be 100+0 if" in said


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run", "pause:0.05,0.05,10", 8, 0, 300)
    assert main(["plan", str(run / "trace.jsonl"), "--machines", "8", "--json", "--what-if", "without=3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"]["policy"] == "backup"
    assert found["recommendation"]["quorum"] + found["recommendation"]["backups"] == 8
    assert len(found["splits"]) == 8 and found["what_if"][0]["machines"] == 7


def test_infinite_means_are_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--latency", "pareto:0.05,0.8", "--machines", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["splits"][-1]["update_seconds"]["mean"] is None and found["recommendation"]["speedup"] is None


def test_step_times_of_another_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import random

    draw = random.Random(0)
    lines = [
        f"{step},{worker},{0.05 + draw.expovariate(40) + (0.2 if worker == 2 else 0)}"
        for step in range(200)
        for worker in range(4)
    ]
    file = tmp_path / "times.csv"
    file.write_text("step,worker,seconds\n" + "\n".join(lines) + "\n")
    assert main(["plan", str(file), "--machines", "8"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 machines were measured; 4 more" in said and "an extrapolation" in said
    assert main(["plan", str(file)]) == 0
    assert "Worker 2 is always slow" in capsys.readouterr().out


def test_a_large_cluster_shows_the_telling_splits_unless_all_are_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--latency", "shifted-exp:1,0.1", "--machines", "60"]
    assert main(words) == 0
    few = capsys.readouterr().out
    assert main([*words, "--all"]) == 0
    every = capsys.readouterr().out
    assert few.count("\n") + 40 < every.count("\n")
    assert "▶" in few and "60+0" in few


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give either a trace"),
        (["--latency", "chen2016"], "machines"),
        (["--latency", "chen2016", "--machines", "0"], "machines is 0"),
        (["--latency", "nonsense:1", "--machines", "4"], "nonsense"),
        (["--latency", "constant:1", "--machines", "4", "--iterations", "5"], "QUORUM:THOUSANDS"),
        (["--latency", "constant:1", "--machines", "4", "--what-if", "color=red"], "what-if"),
        (["--latency", "constant:1", "--machines", "4", "--noise-scale", "10"], "batch"),
        (["--latency", "constant:1", "--machines", "4", "--interval", "2"], "interval"),
        (["--latency", "chen2016", "--machines", "1000000000"], "machines is 1,000,000,000, but the limit is 10,000"),
        (
            ["--latency", "constant:1", "--machines", "9000", "--late", "finish"],
            "the limit is 2,000 where late work finishes",
        ),
        (["--latency", "constant:1", "--machines", "4", "--what-if", "machines=1000000000"], "but the limit is 10,000"),
        (["nowhere"], "does not exist; give a trace.jsonl or the folder of a run"),
        (["nowhere.csv"], "'nowhere.csv' cannot be read: No such file or directory; check the path, or write one with"),
    ],
)
def test_bad_input(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and says in said.err and said.err.count("\n") == 1
