"""What every contender trains: one net on handwritten digits, from the same weights, on the same batches.

Only numpy and the standard library are imported, since the environments of the peers have little else.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.local.measuring import Meter
from benchmarks.local.workload import BATCH, CASES, SEED, sleeps

Array = NDArray[np.float32]

WIDTHS = (64, 256, 256, 10)  # 0.085M parameters
TRAINED = 11 * 8 * BATCH  # samples for training, of 1,797; a multiple of a round, so that no round is short
#: Of an update that averages the gradients of a round, and of an update that is one gradient.
RATE, RATE_ASYNC = 0.4, 0.05
TARGET = 0.95  # accuracy on the other samples
EVALUATE_EVERY = 5  # rounds of 8 gradients
ORDER = "order.npy"

_DIGITS = Path(__file__).parents[2] / "src" / "quorate" / "data" / "digits.csv.gz"


@dataclass(frozen=True)
class Setting:
    """One run of one contender. An update is made of `quorum` gradients; if asynchronous, of one."""

    case: str
    workers: int
    quorum: int
    updates: int
    warmup: int
    folder: str
    asynchronous: bool = False

    @property
    def steps(self) -> int:
        return self.warmup + self.updates

    @property
    def rate(self) -> float:
        return RATE_ASYNC if self.asynchronous else RATE

    @property
    def evaluate_every(self) -> int:
        """Updates between two evaluations; every contender evaluates after about equally many gradients."""
        return EVALUATE_EVERY * self.workers // self.quorum

    def flags(self) -> list[str]:
        named = {name: value for name, value in asdict(self).items() if name != "asynchronous"}
        return [f"--{name}={value}" for name, value in named.items()] + ["--asynchronous"] * self.asynchronous

    @classmethod
    def of_command_line(cls, about: str | None, *more: str) -> tuple[Setting, argparse.Namespace]:
        """The setting, and the options `more` that only this contender has."""
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--case", choices=CASES, required=True)
        for name in ("workers", "quorum", "updates", "warmup"):
            parser.add_argument(f"--{name}", type=int, required=True)
        parser.add_argument("--folder", required=True, help="where the order of the samples lies")
        parser.add_argument("--asynchronous", action="store_true")
        for name in more:
            parser.add_argument(f"--{name}", required=True)
        given = parser.parse_args()
        setting = cls(**{name: vars(given)[name] for name in cls.__dataclass_fields__})
        return setting, given


# ---------------------------------------------------------------- data and net


@cache
def digits() -> tuple[Array, NDArray[np.int64]]:
    """Images [1797, 64] in 0..1 and labels [1797], in a fixed shuffled order: the first TRAINED are for training."""
    rows = list(csv.reader(io.StringIO(gzip.decompress(_DIGITS.read_bytes()).decode())))
    table = np.array([[int(float(value)) for value in row] for row in rows])
    table = table[np.random.default_rng(SEED).permutation(len(table))]
    return (table[:, :64] / 16).astype(np.float32), table[:, 64].astype(np.int64)


def first_weights() -> list[Array]:
    """Weights [in, out] and biases [out] of each layer in turn: the ones that everybody starts from."""
    draws = np.random.default_rng([SEED, 1])
    found: list[Array] = []
    for before, after in pairwise(WIDTHS):
        limit = before**-0.5
        found.append(draws.uniform(-limit, limit, (before, after)).astype(np.float32))
        found.append(draws.uniform(-limit, limit, after).astype(np.float32))
    return found


def accuracy(weights: Sequence[Array]) -> float:
    """Share of the samples outside of the training that the net gets right; weights are [in, out]."""
    images, labels = digits()
    hidden = images[TRAINED:]
    for layer in range(len(WIDTHS) - 1):
        hidden = hidden @ weights[2 * layer] + weights[2 * layer + 1]
        if layer < len(WIDTHS) - 2:
            hidden = np.maximum(hidden, 0)
    return float((hidden.argmax(1) == labels[TRAINED:]).mean())


class Share:
    """A worker's batches, one after the other, each after its sleep."""

    def __init__(self, setting: Setting, worker: int) -> None:
        self.images, self.labels = digits()
        order = np.load(Path(setting.folder) / ORDER)  # [batches, BATCH]
        self._mine = order[worker :: setting.workers]
        # More than a quick worker can need: without a quorum it could make every update alone.
        self.sleeps = sleeps(setting.case, worker, 8 * setting.steps).tolist()
        self.step = 0

    def batch(self, step: int) -> tuple[Array, NDArray[np.int64]]:
        """Images [BATCH, 64] and labels [BATCH]."""
        chosen = self._mine[step % len(self._mine)]
        return self.images[chosen], self.labels[chosen]

    def next(self) -> tuple[Array, NDArray[np.int64]]:
        """Sleep as long as the next step asks for; then its batch."""
        seconds = self.sleeps[self.step]
        if seconds > 0:
            time.sleep(seconds)
        self.step += 1
        return self.batch(self.step - 1)


# ---------------------------------------------------------------- figures


class TrainingMeter(Meter):
    """Also evaluates the weights while they are trained, and counts the bytes that cross the loopback interface.

    It is made right before the first step. `weights` gives the current ones, as `first_weights` does.
    """

    def __init__(self, setting: Setting, weights: Callable[[], Sequence[Array]] | None = None) -> None:
        super().__init__(setting)
        digits()
        self._weights, self._made = weights, 0
        self._curve: list[tuple[float, int, float]] = []
        self._bytes = [0, 0]
        self.begin()

    def begin(self) -> None:
        """Start the clock, which the constructor has started too, again."""
        self._began_s = time.perf_counter()

    def tick(self) -> bool:
        over = super().tick()
        self._made += 1
        if self._made == self._setting.warmup:
            self._bytes[0] = loopback_bytes()
        if self._made == self._setting.steps:
            self._bytes[1] = loopback_bytes()
        if self._weights is not None and (over or self._made % self._setting.evaluate_every == 0):
            self.evaluated(self._made, accuracy(self._weights()))
        return over

    def evaluated(self, updates: int, found: float) -> None:
        self._curve.append((time.perf_counter() - self._began_s, updates, found))

    def print_result(self, loss: float | None = None, **more: Any) -> None:
        reached = next((seconds for seconds, _, found in self._curve if found >= TARGET), None)
        super().print_result(
            loss,
            bytes_per_gradient=(self._bytes[1] - self._bytes[0]) / (self._setting.updates * self._setting.quorum),
            accuracy=self._curve[-1][2] if self._curve else None,
            seconds_to_target=reached,
            curve=[[round(seconds, 3), updates, round(found, 4)] for seconds, updates, found in self._curve],
            **more,
        )


def loopback_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next((int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")), 0)
