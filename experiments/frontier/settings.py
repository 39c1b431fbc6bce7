"""The map: its axes, and what races in each of its cells."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

WORKERS = 16
SEEDS = (1, 2, 3)

#: sigma of lognormal times with a median of 1 s: the slowest of 16 takes 1.2, 2.4, 6 and 14 times the median.
TAILS = (0.1, 0.5, 1.0, 1.5)
#: How many times as long the slowest worker always takes as the fastest; the others lie between, in equal ratios.
SPREADS = (1.0, 3.0, 9.0)
#: Gradients an update at which noise doubles the updates: few for little noise, many for much.
NOISES = (2.0, 8.0, 32.0)
#: Corners of the map that are looked at again on a real task, where the noise is what it is.
CHECKED = tuple(product((0.1, 1.0), (1.0, 9.0)))
DIGITS_NOISE = 0.0  # stands for "as it is"

#: A family, and what may be chosen within it: backups, or arrivals an update.
FAMILIES: dict[str, tuple[int, ...]] = {
    "full-sync": (0,),
    "backup": (1, 2, 4, 8, 12),
    "softsync": (4, 8),
    "async": (1,),
}
FIRST_SHARES = (0.2, 0.4, 0.8)  # of the highest rate that theory allows without noise
MOST_RATES = 7


@dataclass(frozen=True)
class Trial:
    """One method in one cell: its rate is tuned, then it runs with every seed."""

    task: str
    tail: float
    spread: float
    noise: float
    family: str
    option: int

    @property
    def cell(self) -> tuple[str, float, float, float]:
        return self.task, self.tail, self.spread, self.noise


def all_trials() -> list[Trial]:
    """The checks on digits come last."""
    cells = [("bowl", *cell) for cell in product(TAILS, SPREADS, NOISES)]
    cells += [("digits", *cell, DIGITS_NOISE) for cell in CHECKED]
    return [
        Trial(*cell, family, option) for cell in cells for family, options in FAMILIES.items() for option in options
    ]


def quick_trials() -> list[Trial]:
    """Two cells of the bowl, so that there is something to draw."""
    wanted = {"full-sync": 0, "backup": 2, "softsync": 4, "async": 1}
    return [
        Trial("bowl", tail, 1.0, NOISES[0], family, option) for tail in (0.1, 1.0) for family, option in wanted.items()
    ]


def latency_text(tail: float, spread: float, workers: int = WORKERS) -> str:
    """Times as a latency model."""
    text = f"lognormal:1,{tail:g}"
    if spread > 1:
        factors = (f"{worker}={spread ** (worker / (workers - 1)):.4g}" for worker in range(1, workers))
        text += f"*slow:{','.join(factors)}"
    return text
