"""The study's table: one training, and what its versions were like on the test data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

TUNING_SEED = 0
#: The accuracy of whoever knows nothing of ten kinds.
GUESSING = 0.1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training. `compensation` is the λ of DC-ASGD."""

    net: str
    delay: int
    repair: str
    momentum: float
    compensation: float = 0.0
    lr: float
    seed: int = TUNING_SEED

    @property
    def tuning(self) -> bool:
        return self.seed == TUNING_SEED

    @property
    def guessing(self) -> float:
        return GUESSING

    @property
    def method(self) -> tuple[str, int, str]:
        return self.net, self.delay, self.repair


class Row(NamedTuple):
    """What a version of a training was like. `diverged`: nothing finite came after it."""

    epoch: float
    update: int
    accuracy: float
    test_loss: float
    diverged: int


def final_accuracy(rows: Sequence[Row], guessing: float = GUESSING) -> float:
    """Of the last version; one that diverged can only guess."""
    return guessing if rows[-1].diverged else rows[-1].accuracy
