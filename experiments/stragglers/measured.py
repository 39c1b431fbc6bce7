"""The same on real processes of this machine: arrivals of a round while other programs want the cores, too.

What it is: worker processes of one machine that share its cores, each held back by an artificial delay that stands for
an accelerator's time, then computing a small gradient for real; and more of them that only compute, so that nobody has
made up when they are late. What it is not: machines with a network between them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

import quorate
from experiments.stragglers.published import LEVELS
from experiments.stragglers.simulated import MEAN, Arrival, quantile
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

#: Workers that only compute a larger gradient, eight for each of two cores.
CONTENDING = "only computing"
#: Delays before each ticket, as latency texts: no tail, a mild one, and one ticket in 25 held ten times as long.
DELAYS = {
    "none but the cores": "constant:0.06",
    "exponential": "shifted-exp:0.04,0.02",
    "pauses": "pause:0.03,0.04,10",
    CONTENDING: None,
}
#: Levels of a row with the quorum that the planner recommends from a full-sync run (its seconds are what that run's
#: arrivals foretell), or keeps since it will not judge other splits.
PLANNED, KEPT = "planned", "kept"


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


class WideDigits(EndlessDigits):
    """1.1M parameters and 64 pictures: some 15 ms of a core."""

    batch_size = 64

    def model(self) -> nn.Module:
        flat, first, second = nn.Flatten(), nn.Linear(64, 1024), nn.Linear(1024, 1024)
        return nn.Sequential(flat, first, nn.ReLU(), second, nn.ReLU(), nn.Linear(1024, 10))


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
    delays: tuple[str, ...] = tuple(name for name, latency in DELAYS.items() if latency)
    contending: int = 16  # workers that only compute
    contending_rounds: int = 210
    contending_backups: tuple[int, ...] = (0, 1, 2, 4, 8)


QUICK = Setting(
    workers=3,
    rounds=WARM_UP + 5,
    repeats=1,
    neighbours=(1,),
    backups=(0, 1),
    delays=("exponential",),
    contending=3,
    contending_rounds=WARM_UP + 20,
    contending_backups=(0, 1),
)


def wanted(setting: Setting) -> Iterator[Processes]:
    """Repeats outermost, so that an hour in which the machine is busy disturbs all alike."""
    for repeat in range(1, setting.repeats + 1):
        for delay in setting.delays:
            for neighbours in setting.neighbours:
                for backups in setting.backups:
                    quorum = setting.workers - backups
                    yield Processes(delay, neighbours, setting.workers, quorum, setting.rounds, repeat)
        for backups in setting.contending_backups:
            workers = setting.contending
            yield Processes(CONTENDING, 0, workers, workers - backups, setting.contending_rounds, repeat)


def run_processes(trial: Processes) -> list[Arrival]:
    """Mean seconds until the k-th gradient, up to the quorum's; of full sync without delays also quantiles and plan."""
    arrivals = KthArrivals()
    latency = DELAYS[trial.delay]
    with busy_neighbours(trial.neighbours), tempfile.TemporaryDirectory() as folder:
        result = quorate.train(
            EndlessDigits() if latency else WideDigits(),
            quorate.BackupSync(trial.quorum, trial.workers - trial.quorum),
            quorate.Local(trial.workers, latency=latency),
            updates=trial.rounds,
            evaluate_every=trial.rounds,
            seed=trial.repeat,
            recorders=(arrivals,),
            out=None if latency else f"{folder}/run",
        )
        # A gradient beyond the quorum sometimes arrives before its worker hears that the round is over.
        counted = {k: sorted(times[WARM_UP:]) for k, times in enumerate(arrivals.times[: trial.quorum], 1)}
        means = {k: statistics.fmean(times) for k, times in counted.items()}
        rows = [Arrival(k, MEAN, mean) for k, mean in means.items()]
        if latency is None and trial.quorum == trial.workers:
            rows += [Arrival(k, str(level), quantile(times, level)) for k, times in counted.items() for level in LEVELS]
            advice = quorate.plan(str(result.out)).recommendation
            rows.append(Arrival(advice.quorum, KEPT if advice.is_kept else PLANNED, means[advice.quorum]))
    return rows


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
