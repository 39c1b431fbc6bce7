"""The local engine keeps the contract, with real processes that are held back now and then."""

from __future__ import annotations

import pytest

from quorate.engines import Local
from tests.contract.suite import ModelContract


@pytest.mark.usefixtures("warm")
class TestLocal(ModelContract):
    def engine(self, workers: int) -> Local:
        return Local(workers, latency="shifted-exp:0.001,0.002*pauses:0.1,8")
