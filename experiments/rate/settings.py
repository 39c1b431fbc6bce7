"""The grid: quorums, backups, noise; and the clusters whose arrivals are timed."""

from __future__ import annotations

from dataclasses import dataclass

#: Digits are so few that one training says little.
SEEDS = {"bowl": (1, 2, 3), "digits": tuple(range(1, 13))}
QUORUMS = (1, 2, 4, 8, 16, 32, 64, 128)
BACKUPS = (0, 1, 2, 4, 8, 16)
#: Gradients an update at which noise doubles the updates, on the bowl. The whole grid of backups is run for one.
NOISES = (4.0, 16.0, 64.0)
GRID_NOISE = 16.0
#: On digits the noise is what it is.
DIGITS_QUORUMS = (1, 2, 4, 8, 16, 32, 64)
DIGITS_BACKUPS = (0, 4)
LATENCY = "chen2016"

FIRST_RATES = (0.2, 0.4, 0.8, 1.6)
DIGITS_RATES = (0.1, 0.2, 0.4, 0.8)
MOST_RATES = 9


@dataclass(frozen=True)
class Trial:
    """A quorum with a rate tuned without backups, and then run with all of these numbers of them ("0 1 2")."""

    task: str
    noise: float  # 0 for digits: as it is
    quorum: int
    backups: str

    @property
    def numbers_of_backups(self) -> list[int]:
        return [int(number) for number in self.backups.split()]


@dataclass(frozen=True)
class Timed:
    """A cluster whose every arrival is waited for and timed, without gradients."""

    latency: str
    workers: int
    rounds: int


def all_trials() -> list[Trial]:
    """The bowl's first."""
    grid = " ".join(map(str, BACKUPS))
    trials = [
        Trial("bowl", noise, quorum, grid if noise == GRID_NOISE else "0") for noise in NOISES for quorum in QUORUMS
    ]
    return trials + [
        Trial("digits", 0.0, quorum, " ".join(map(str, DIGITS_BACKUPS))) for quorum in reversed(DIGITS_QUORUMS)
    ]


def quick_trials() -> list[Trial]:
    return [Trial("bowl", GRID_NOISE, quorum, "0 1") for quorum in (16, 32)]


#: How b should grow with n: clusters of these sizes, under tails of different weight.
SIZES = (8, 16, 32, 64, 100)
TAILS = ("chen2016", "shifted-exp:0.9,0.1", "lognormal:1,0.5", "pareto:0.6,1.6")
ROUNDS = 4000


def all_timed() -> list[Timed]:
    """The sizes of the grid too, so that seconds can be foretold there."""
    grid = {quorum + backups for quorum in QUORUMS for backups in BACKUPS}
    timed = [Timed(LATENCY, workers, ROUNDS) for workers in sorted(grid.union(SIZES))]
    return timed + [Timed(latency, workers, ROUNDS) for latency in TAILS[1:] for workers in SIZES]


def quick_timed() -> list[Timed]:
    return [Timed(LATENCY, workers, 50) for workers in (8, 16, 17, 32, 33)]
