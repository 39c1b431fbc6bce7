"""Training scripts as other people write them, with the lines changed that docs/collective.md names.

Each runs under DDP and under every policy, with and without a slow process, in one start of three processes. None may
hang, and full sync must give DDP's numbers.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.clients.harness import NAMES, WORKERS
from tests.data_parallel.torchrun import torchrun

SCRIPTS = Path(__file__).parent / "scripts"
PATHS = os.pathsep.join([str(SCRIPTS.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
Seen = dict[str, list[dict[str, Any]]]  # by case, by worker

plain = pytest.mark.clients
integrated = pytest.mark.integrations
pytestmark = pytest.mark.timeout(250)


class Clients:
    """What each script left, by its name; a script runs once."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders, self._seen = folders, dict[str, Seen]()

    def __call__(self, script: str) -> Seen:
        if script not in self._seen:
            folder = self._folders.mktemp(script)
            settings = {"PYTHONPATH": PATHS, "HF_HUB_OFFLINE": "1"}
            torchrun(WORKERS, SCRIPTS / f"{script}.py", str(folder), settings=settings, timeout_s=200.0)
            by_worker = [json.loads((folder / f"{worker}.json").read_text()) for worker in range(WORKERS)]
            self._seen[script] = {case: [seen[case] for seen in by_worker] for case in NAMES}
        return self._seen[script]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    return Clients(tmp_path_factory)


def script(name: str, needs: str | None = None) -> Any:
    """A parameter: a client script, and what has to be installed for it."""
    if needs is None:
        return pytest.param(name, marks=plain)
    missing = pytest.mark.skipif(find_spec(needs) is None, reason=f"{needs} is not installed")
    return pytest.param(name, marks=[integrated, missing])


EPOCHS = [script("reference"), script("with_accelerate", "accelerate"), script("with_fabric", "lightning")]
ALL = [script("accumulation"), *EPOCHS, script("trainer", "transformers")]


@pytest.mark.parametrize("name", ALL)
def test_every_policy_trains_it_and_ends_with_the_same_model_everywhere(clients: Clients, name: str) -> None:
    for case in NAMES:
        workers = clients(name)[case]
        assert [worker["same"] for worker in workers] == [True] * WORKERS, case
        for found in ("scores", "losses"):  # which the script adds up over all processes
            if name != "accumulation":
                assert len({str(worker.get(found)) for worker in workers}) == 1, case


@pytest.mark.parametrize("name", ALL)
def test_full_sync_gives_the_numbers_of_ddp(clients: Clients, name: str) -> None:
    seen = clients(name)
    for worker, expected in zip(seen["full"], seen["ddp"], strict=True):
        assert worker["values"] == pytest.approx(expected["values"], rel=1e-5, abs=1e-5)
        assert worker["losses" if "losses" in worker else "scores"] == pytest.approx(
            expected["losses" if "losses" in expected else "scores"], rel=1e-5
        )


@pytest.mark.parametrize("name", ALL[1:])
def test_the_last_checkpoint_holds_the_model_under_its_own_names(clients: Clients, name: str) -> None:
    for case in NAMES:
        assert [worker["saved"] for worker in clients(name)[case]] == [True] * WORKERS, case


@pytest.mark.parametrize("name", EPOCHS)
def test_each_epoch_uses_every_batch_once(clients: Clients, name: str) -> None:
    seen = clients(name)
    for case in NAMES:
        for epoch in range(len(seen[case][0]["used"])):
            together = sum((Counter(_batches(worker["used"][epoch])) for worker in seen[case]), Counter[str]())
            expected = sum((Counter(_batches(worker["used"][epoch])) for worker in seen["ddp"]), Counter[str]())
            assert together == expected, (case, epoch)


def _batches(used: Any) -> list[str]:
    """Samples, where the script noted them; else as many marks as batches."""
    return list(Counter(used).elements()) if isinstance(used, dict) else ["batch"] * used


# ------------------------------------------------------------ what only one of them shows


@plain
def test_gradients_leave_once_an_iteration_where_the_script_says_so(clients: Clients) -> None:
    """`require_backward_grad_sync = False` holds them back, as `no_sync()` does."""
    for case in ("full", "delayed"):
        for worker in clients("accumulation")[case]:
            assert worker["sent"] < 1.5 * len(worker["values"]) * worker["versions"]


@plain
def test_a_loop_of_steps_ends_at_its_version_in_every_process(clients: Clients) -> None:
    seen = clients("accumulation")
    for case in NAMES:
        assert {worker["versions"] for worker in seen[case]} == {12}, case
        losses = seen[case][0]["losses"]
        assert losses[-1] < losses[0], case
        assert "letters.weight" in seen[case][0]["names"]


@integrated
def test_accelerate_finds_the_model_inside(clients: Clients) -> None:
    for case in NAMES:
        for worker in clients("with_accelerate")[case]:
            assert worker["unwrapped"]
            assert worker["names"][-1] == "words.weight"  # without a prefix


@integrated
@pytest.mark.parametrize("case", NAMES)
def test_a_trainer_logs_and_saves_by_updates(clients: Clients, case: str) -> None:
    """A quorum of two takes two batches a step, so an epoch has half again as many updates."""
    steps = 18 if case.startswith("backup") else 12
    for worker in clients("trainer")[case]:
        assert worker["steps"] == steps
        assert len(worker["losses"]) == steps // 2
        assert worker["checkpoints"] == sorted(f"checkpoint-{step}" for step in {*range(4, steps, 4), steps})
