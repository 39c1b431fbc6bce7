"""The examples train, in real processes, with and without a slow one; and the frameworks' own numbers are met."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.data_parallel.launching import Launcher
from tests.data_parallel.torchrun import launched, torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = Path(__file__).parent / "scripts"
SAMPLES, BATCH = 1438, 16  # of the digits
LINE = re.compile(r"worker (\d+): (\d+) gradients used, (\d+) dropped, ([\d.]+)%")

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="Accelerate is not installed: pip install 'quorate[accelerate]'"
)
needs_fabric = pytest.mark.skipif(
    find_spec("lightning") is None, reason="Lightning is not installed: pip install 'quorate[fabric]'"
)


def told_by_workers(output: str, workers: int) -> dict[int, tuple[int, int, float]]:
    """By worker: gradients used and dropped, and the accuracy in percent."""
    told = {
        int(worker): (int(used), int(dropped), float(score)) for worker, used, dropped, score in LINE.findall(output)
    }
    assert sorted(told) == list(range(workers)), output
    return told


def check_trained(
    told: dict[int, tuple[int, int, float]], epochs: int, batch_size: int = BATCH, least: float = 90
) -> None:
    """Each batch of each epoch was used once, whatever was dropped; and all have the same good parameters."""
    assert sum(used for used, _, _ in told.values()) == epochs * -(-SAMPLES // batch_size)
    assert len({score for _, _, score in told.values()}) == 1
    assert min(score for _, _, score in told.values()) > least


def check_late_was_dropped(told: dict[int, tuple[int, int, float]]) -> None:
    slow = told[max(told)]
    assert slow[1] > 0  # it was late at least once, and nobody waited
    assert slow[0] < min(used for worker, (used, _, _) in told.items() if worker != max(told))


@pytest.mark.data_parallel
def test_the_torchrun_script_with_full_sync() -> None:
    output = torchrun(2, EXAMPLES / "torchrun_script.py", "--epochs", "4")
    told = told_by_workers(output, 2)
    check_trained(told, 4)
    assert all(dropped == 0 for _, dropped, _ in told.values())


@pytest.mark.data_parallel
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("batch_size", [15, 17], ids=["even", "uneven"])  # 96 and 85 batches
@pytest.mark.parametrize("options", [[], ["--backups", "1"]], ids=["full", "backup"])
def test_the_torchrun_script_whether_batches_divide_among_the_processes_or_not(
    launcher: Launcher, tmp_path: Path, workers: int, batch_size: int, options: list[str]
) -> None:
    options = [*options, "--epochs", "2", "--batch-size", str(batch_size)]
    told = told_by_workers(launcher.ran(EXAMPLES / "torchrun_script.py", workers, tmp_path, *options), workers)
    check_trained(told, 2, batch_size, least=15)  # after two epochs it is just better than chance


@pytest.mark.data_parallel
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_other_examples(launcher: Launcher, tmp_path: Path, workers: int) -> None:
    (tmp_path / "elastic").mkdir()
    folder = str(tmp_path / "elastic" / "run")
    output = launcher.ran(EXAMPLES / "elastic.py", workers, tmp_path / "elastic", folder, "--updates", "30")
    assert "ends at version 30" in output
    (tmp_path / "measured").mkdir()
    launcher.ran(EXAMPLES / "measure_ddp.py", workers, tmp_path / "measured", str(tmp_path / "times.csv"))
    assert (tmp_path / "times.csv").exists()


@pytest.mark.long
def test_the_torchrun_script_with_a_backup_and_a_slow_process(tmp_path: Path) -> None:
    epochs = 8  # after four the accuracy is 91 to 94 %: which gradients count depends on time
    options = ["--epochs", str(epochs), "--backups", "1", "--straggler", "--out", str(tmp_path / "run")]
    told = told_by_workers(torchrun(3, EXAMPLES / "torchrun_script.py", *options), 3)
    check_trained(told, epochs)
    check_late_was_dropped(told)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["samples"] == {"applied": epochs * SAMPLES, "distinct": SAMPLES}


def test_at_most_five_lines_differ_from_ddp() -> None:
    marks = re.findall(r"# ← (\d)", (EXAMPLES / "torchrun_script.py").read_text())
    assert marks == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("name", ["torchrun_script", "accelerate_script", "fabric_script"])
def test_the_guide_names_each_example(name: str) -> None:
    assert f"examples/{name}.py" in (EXAMPLES.parent / "docs" / "collective.md").read_text()


# ------------------------------------------------------------ Accelerate


@pytest.mark.integrations
@needs_accelerate
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_accelerate_script(workers: int) -> None:
    epochs = 4 if workers == 2 else 8  # more processes make fewer updates an epoch, a slow one fewer still
    options = ["--epochs", str(epochs), *(["--backups", "1", "--straggler"] if workers == 3 else [])]
    told = told_by_workers(torchrun(workers, EXAMPLES / "accelerate_script.py", *options), workers)
    check_trained(told, epochs)
    if workers == 3:
        check_late_was_dropped(told)


@pytest.mark.integrations
@needs_accelerate
def test_accelerate_gives_the_numbers_of_its_own_ddp(tmp_path: Path) -> None:
    torchrun(2, SCRIPTS / "with_accelerate.py", str(tmp_path))
    for seen in seen_by_workers(tmp_path):
        assert seen["difference"] < 1e-6
        assert seen["skipped"] == [1, 1]  # with their DDP, and with ours
        assert seen["updates"] == 8  # of nine steps one was skipped
        assert seen["loaded"]
        messages = [
            "DataParallel already",
            "prepared by Accelerate already",
            "accelerator is a",
            "the one that is inside",
        ]
        assert all(message in said for message, said in zip(messages, seen["refused"], strict=True))


# ------------------------------------------------------------ Lightning Fabric


@pytest.mark.integrations
@needs_fabric
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_fabric_script(workers: int, tmp_path: Path) -> None:
    epochs = 4 if workers == 2 else 8
    options = ["--epochs", str(epochs), "--workers", str(workers), "--save", str(tmp_path / "saved")]
    options += ["--backups", "1", "--straggler"] if workers == 3 else []
    told = told_by_workers(launched([sys.executable, str(EXAMPLES / "fabric_script.py"), *options]), workers)
    check_trained(told, epochs)
    assert (tmp_path / "saved").exists()
    if workers == 3:
        check_late_was_dropped(told)


@pytest.mark.integrations
@needs_fabric
def test_fabric_gives_the_numbers_of_its_own_ddp(tmp_path: Path) -> None:
    torchrun(2, SCRIPTS / "with_fabric.py", str(tmp_path))
    for seen in seen_by_workers(tmp_path):
        assert seen["difference"] < 1e-6
        assert seen["updates"] == 10
        assert seen["loaded"]
        assert seen["names"] == ["0.bias", "0.weight", "2.bias", "2.weight"]  # as saved by any other strategy
        messages = ["together with its optimizer", "together with its model", "2 optimizers", "no quorate.DataParallel"]
        assert all(message in said for message, said in zip(messages, seen["refused"], strict=True))


def seen_by_workers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{worker}.json").read_text()) for worker in range(2)]
