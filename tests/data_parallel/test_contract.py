"""The collective engine keeps the contract, with scripts in real processes.

It holds no model and is not opened by `quorate.train`: parameters, optimizer and errors of a loss are the script's. So
it inherits the tests for all engines, and not those for engines that hold the model.
"""

from __future__ import annotations

import json
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate.trace import Recorder, feed, read_trace
from tests.contract.case import WORKERS, Case
from tests.contract.suite import EngineContract
from tests.data_parallel.launching import Launcher


@pytest.mark.data_parallel
class TestCollective(EngineContract):
    policies = tuple(policy for policy in EngineContract.policies if policy.collective)
    replays_gradients = False

    @pytest.fixture(autouse=True)
    def _launch(self, launcher: Launcher, tmp_path: Path) -> None:
        self.launcher, self.folder = launcher, tmp_path

    def run(self, case: Case, recorder: Recorder | None = None) -> dict[str, Any]:
        (self.folder / "case.pkl").write_bytes(pickle.dumps(case))
        launch = self.launcher.launch("contract.py", WORKERS, self.folder, str(self.folder))
        assert launch.wait(110) == [0] * WORKERS, "\n".join(launch.text(worker) for worker in range(WORKERS))
        refused = self.folder / "error.txt"
        if refused.exists():
            raise quorate.BadInput(refused.read_text())
        if recorder is not None:
            with closing(read_trace(case.out)) as records:
                feed(records, recorder)
        summary: dict[str, Any] = json.loads((case.out / "summary.json").read_text())
        return summary
