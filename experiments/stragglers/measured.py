"""The same on real processes of this machine: arrivals of a round while other programs want the cores, too.

What it is: worker processes of one machine that share its cores, each held back by an artificial delay that stands for
an accelerator's time, then computing a small gradient for real. What it is not: machines with a network between them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import quorate
from experiments.stragglers.simulated import MEAN, Arrival
from quorate.metrics import KthArrivals
from quorate.tasks.digits import Digits

#: Rounds at the start that do not count: memory is touched for the first time, and clocks of the processor rise.
WARM_UP = 10

#: A neighbour computes for up to 0.3 s, then rests as long, at random: bursts, as other people's programs have them.
NEIGHBOUR = """
import random, sys, time
draws = random.Random(int(sys.argv[1]))
while True:
    until = time.monotonic() + draws.uniform(0.0, 0.3)
    while time.monotonic() < until:
        sum(range(2000))
    time.sleep(draws.uniform(0.0, 0.3))
"""

#: Delays before each ticket, as latency texts: no tail, a mild one, and one ticket in 25 held ten times as long.
DELAYS = {
    "none but the cores": "constant:0.06",
    "exponential": "shifted-exp:0.04,0.02",
    "pauses": "pause:0.03,0.04,10",
}


class _Endless:
    """A stream: sample after sample, again and again."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitem__(self, seed: int) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self._data[seed % len(self._data)]
        return found


class EndlessDigits(Digits):
    """The digits without epochs: the last round of an epoch is short, and would say nothing of the last arrivals."""

    def train_data(self) -> Any:
        return _Endless(super().train_data())


@dataclass(frozen=True)
class Processes:
    """One run on real processes. `repeat` is its seed, too."""

    delay: str
    neighbours: int
    workers: int
    quorum: int
    rounds: int
    repeat: int


@dataclass(frozen=True)
class Setting:
    """How much is run."""

    workers: int = 12
    rounds: int = 70
    repeats: int = 3
    neighbours: tuple[int, ...] = (0, 4)
    backups: tuple[int, ...] = (0, 1, 2)
    delays: tuple[str, ...] = tuple(DELAYS)


QUICK = Setting(workers=3, rounds=WARM_UP + 5, repeats=1, neighbours=(1,), backups=(0, 1), delays=("exponential",))


def wanted(setting: Setting) -> Iterator[Processes]:
    """Repeats outermost, so that an hour in which the machine is busy disturbs all alike."""
    for repeat in range(1, setting.repeats + 1):
        for delay in setting.delays:
            for neighbours in setting.neighbours:
                for backups in setting.backups:
                    quorum = setting.workers - backups
                    yield Processes(delay, neighbours, setting.workers, quorum, setting.rounds, repeat)


def run_processes(trial: Processes) -> list[Arrival]:
    """Mean seconds until the k-th gradient, up to the quorum's."""
    arrivals = KthArrivals()
    with busy_neighbours(trial.neighbours):
        quorate.train(
            EndlessDigits(),
            quorate.BackupSync(trial.quorum, trial.workers - trial.quorum),
            quorate.Local(trial.workers, latency=DELAYS[trial.delay]),
            updates=trial.rounds,
            evaluate_every=trial.rounds,
            seed=trial.repeat,
            recorders=(arrivals,),
        )
    return [Arrival(k, MEAN, statistics.fmean(times[WARM_UP:])) for k, times in enumerate(arrivals.times, 1)]


@contextmanager
def busy_neighbours(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Other programs on this machine, for a while."""
    neighbours = []
    with ExitStack() as running:
        for number in range(count):
            process = running.enter_context(subprocess.Popen([sys.executable, "-c", NEIGHBOUR, str(number)]))
            running.callback(process.terminate)  # runs before the wait of the line above
            neighbours.append(process)
        yield neighbours
