"""Which trainings there are: sequences of four lengths, and what becomes of a gradient that is late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: Characters of a sequence. Every item is a batch of equally long sequences, and there are equally many of each length.
LENGTHS = (16, 32, 64, 128)
WORKERS = 4
SEQUENCES = 8  # of an item

FULL_SYNC, GIVEN_BACK, GONE = "full sync", "3+1, given back", "3+1, gone for good"
#: How batches are handed out -> quorum of four processes.
QUORUMS = {FULL_SYNC: 4, GIVEN_BACK: 3, GONE: 3}


@dataclass(frozen=True)
class Training:
    """One training of four real processes: so many epochs of so many items, each item a gradient."""

    how: str
    items: int
    epochs: int
    width: int
    seed: int

    @property
    def updates(self) -> int:
        return self.items * self.epochs // QUORUMS[self.how]


class OfLength(NamedTuple):
    """What became of the sequences of one length."""

    length: int
    used: int  # gradients that are in an update
    computed: int  # gradients that a process began; those that were abandoned included
    loss: float  # on text that was not trained on, nats a character
    seconds: float  # of the whole training


@dataclass(frozen=True)
class Setting:
    """How much is run. The items are a multiple of 12, so that no round of an epoch is short."""

    items: int = 1200
    epochs: int = 3
    width: int = 64
    seeds: tuple[int, ...] = (1, 2, 3)


QUICK = Setting(items=24, epochs=1, width=8, seeds=(1,))


def wanted(setting: Setting) -> Iterator[Training]:
    """Seeds outermost, so that an hour in which the machine is busy disturbs all alike."""
    for seed in setting.seeds:
        for how in QUORUMS:
            yield Training(how, setting.items, setting.epochs, setting.width, seed)
