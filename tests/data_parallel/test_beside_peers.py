"""The peers' benchmark: whoever waits for everybody trains the same net to the same accuracies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.peers import environments, tables
from benchmarks.peers.__main__ import PEERS

pytestmark = pytest.mark.data_parallel

ROOT = Path(__file__).parents[2]


def sweep(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.peers", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


def test_full_sync_trains_alike_everywhere(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = sweep("--quick", "--cases", "a", "--only", "ddp", "local", "data-parallel", "--out", str(out))
    assert done.returncode == 0, done.stderr
    runs = {run["contender"]: run for run in json.loads(out.read_text())["runs"]}
    assert set(runs) == {"ddp", "local", "data-parallel"}
    # Float addition in another order may turn one test picture of 389.
    accuracies = [[one for _, _, one in run["curve"]] for run in runs.values()]
    assert len(accuracies[0]) == 6
    for curve in accuracies[1:]:
        assert curve == pytest.approx(accuracies[0], abs=0.01)


def test_an_environment_counts_once_it_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    assert environments.python_of("mxnet") is None
    (tmp_path / "mxnet").mkdir()
    (tmp_path / "mxnet" / ".ready").touch()
    assert environments.python_of("mxnet") == str(tmp_path / "mxnet" / "bin" / "python")


def test_the_committed_run_has_every_contender_in_every_case() -> None:
    for case in ("a", "b", "c"):
        assert [row.name for row in tables.rows(case)] == list(PEERS)


def test_an_unknown_peer_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.peers.environments", "horovod"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "there is no peer 'horovod'; choose from tensorflow, mxnet, torchft" in done.stderr
