"""The simulated engine keeps the contract: plain, over a network, and with workers that come and go."""

from __future__ import annotations

from quorate.engines import Simulated
from tests.contract.suite import ModelContract


class TestSimulated(ModelContract):
    def engine(self, workers: int) -> Simulated:
        return Simulated(workers, "shifted-exp:1,0.5*pauses:0.1,8")


class TestSimulatedNetwork(ModelContract):
    def engine(self, workers: int) -> Simulated:
        return Simulated(workers, "lognormal:1,0.6*slow:0=1.5", network="bandwidth=10KB/s,latency=10ms,server=20KB/s")


class TestSimulatedCrashes(ModelContract):
    def engine(self, workers: int) -> Simulated:
        faults = "crash:25,3;lose:0@5;join:0@6.5" if workers > 1 else None
        return Simulated(workers, "shifted-exp:1,0.5", faults=faults)
