"""Full sync gives what DistributedDataParallel gives, and delayed sync what a plain loop with that delay gives."""

from __future__ import annotations

import json

import pytest

from tests.data_parallel.launching import Launcher
from tests.data_parallel.scripts.equals import CASES, DELAYS

pytestmark = pytest.mark.data_parallel

WORKERS = 3


@pytest.fixture(scope="module")
def differences(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """By case, how far each process's parameters are from what they should be after its updates."""
    folder = tmp_path_factory.mktemp("equals")
    launch = launcher.launch("equals.py", WORKERS, folder, str(folder))
    assert launch.wait(110) == [0] * WORKERS, launch.text(0)
    found: dict[str, list[float]] = json.loads((folder / "differences.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_full_sync_equals_ddp(differences: dict[str, list[float]], case: str) -> None:
    assert max(differences[case]) < 1e-10


@pytest.mark.parametrize("case", DELAYS)
def test_a_delay_equals_a_plain_loop_with_that_delay(differences: dict[str, list[float]], case: str) -> None:
    assert max(differences[case]) < 1e-10
