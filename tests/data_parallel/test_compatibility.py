"""What scripts do besides plain loops works as with DDP: kinds of modules, scalers, averages, torch.compile.

All cases run in one start of two processes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.data_parallel.scripts.compatibility import CASES, NOT_THE_SAME
from tests.data_parallel.torchrun import torchrun

pytestmark = pytest.mark.data_parallel

SCRIPT = Path(__file__).parent / "scripts" / "compatibility.py"
POLICIES = ["full-sync", "backup"]
WORKERS = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each worker has seen."""
    return seen_by_workers(tmp_path_factory.mktemp("compatibility"), [], {})


def seen_by_workers(folder: Path, names: list[str], settings: dict[str, str]) -> list[dict[str, Any]]:
    torchrun(WORKERS, SCRIPT, str(folder), *names, settings=settings)
    return [json.loads((folder / f"{worker}.json").read_text()) for worker in range(WORKERS)]


def check_equal(seen: dict[str, Any]) -> None:
    assert "error" not in seen, seen["error"]
    assert seen["difference"] <= 1e-5 * seen["size"]


@pytest.mark.parametrize(
    ("name", "policy"), [(name, policy) for name in CASES for policy in POLICIES if (name, policy) not in NOT_THE_SAME]
)
def test_the_numbers_are_those_of_ddp(results: list[dict[str, Any]], name: str, policy: str) -> None:
    for worker in results:
        check_equal(worker[f"{name} {policy}"])


@pytest.mark.integrations
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU: install g++")
def test_what_inductor_compiles_gives_the_numbers_of_ddp(tmp_path: Path) -> None:
    names = [name for name in CASES if name.startswith("compiled")]
    # In this process and folder alone, without trying out the processor with one compiled program after another.
    settings = {
        "COMPILE_BACKEND": "inductor",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "0",
    }
    for worker in seen_by_workers(tmp_path, names, settings):
        assert len(worker) == len(names) * len(POLICIES)
        for seen in worker.values():
            check_equal(seen)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["scaler_that_skips", "scaler_and_fused_optimizer"])
def test_a_step_with_inf_is_skipped_everywhere(results: list[dict[str, Any]], name: str, policy: str) -> None:
    assert [worker[f"{name} {policy}"]["skipped"] for worker in results] == [1] * WORKERS


def test_the_names_in_a_state_dict_are_those_of_ddp(results: list[dict[str, Any]]) -> None:
    for worker in results:
        keys = worker["evaluating_and_loading full-sync"]["keys"]
        assert keys == sorted(f"module.{number}.{kind}" for number in (0, 3, 5) for kind in ("bias", "weight"))


def test_what_follows_a_step_in_an_iteration_is_not_skipped(results: list[dict[str, Any]]) -> None:
    assert results[1]["iteration"] == {"stepped": 1, "went on": 1}


def test_an_iteration_that_is_late_before_its_forward_is_abandoned_too(results: list[dict[str, Any]]) -> None:
    seen = results[1]["late before forward"]
    assert seen["versions"] == sorted(set(seen["versions"])), "it goes on from the newest version each time"
    assert 0 not in seen["reached"], "it was late when it read its first parameter"
    assert not any(applied for turn, applied in enumerate(seen["applied"]) if turn not in seen["reached"])
