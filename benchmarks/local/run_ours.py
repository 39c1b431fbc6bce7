"""Quorate's Local engine: real worker processes; full-sync, or backup workers where the quorum is below the workers.

python -m benchmarks.local.run_ours --size 5M --case b --workers 8 --quorum 6
"""

from __future__ import annotations

from collections.abc import Callable

import quorate
from benchmarks.local.measuring import Meter, Setting
from benchmarks.local.task import LinearMap, PeerDraws
from benchmarks.local.workload import SEED
from quorate.trace import Update


class _Ticks(quorate.Recorder):
    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.loss: float | None = None

    def applied(self, time: float, update: Update) -> None:
        self._meter.tick()
        self.loss = update.loss


def train(setting: Setting, meter: Meter, engine: Callable[[int, quorate.Latency | None], quorate.Engine]) -> None:
    """Measure a run on the engine that is made of a number of workers and their sleeps."""
    workers, quorum = setting.workers, setting.quorum
    task = LinearMap(setting.size, workers, setting.steps * quorum + workers)
    policy = quorate.FullSync() if quorum == workers else quorate.BackupSync(quorum, workers - quorum)
    latency = None if setting.case == "a" else PeerDraws(setting.case, setting.steps)
    ticks = _Ticks(meter)
    quorate.train(
        task,
        policy,
        engine(workers, latency),
        updates=setting.steps,
        seed=SEED,
        evaluate_every=10**9,
        recorders=(ticks,),
    )
    meter.print_result(ticks.loss)


def main() -> None:
    setting = Setting.of_command_line(__doc__)
    train(setting, Meter(setting), lambda workers, latency: quorate.Local(workers, latency=latency, threads=1))


if __name__ == "__main__":
    main()
