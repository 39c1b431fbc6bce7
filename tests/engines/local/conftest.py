"""What the tests of the local engine share."""

from __future__ import annotations

import pytest

from quorate.engines.local import workers
from quorate.engines.shared import worker_health


@pytest.fixture
def quick_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that fail again and again are started again without a rest."""
    monkeypatch.setattr(worker_health, "_BACK_OFF_S", 0.001)


@pytest.fixture
def no_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost workers stay lost."""
    real, begun = workers.LocalWorkers.start, set()

    def start(self: workers.LocalWorkers, worker: int) -> None:
        if (self, worker) not in begun:
            begun.add((self, worker))
            real(self, worker)

    monkeypatch.setattr(workers.LocalWorkers, "start", start)
