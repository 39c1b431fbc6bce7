"""Base classes of latency models, and checks of their parameters."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from quorate.errors import BadInput
from quorate.seeds import derive, uniform

Draw = Callable[[int, int, int, float], float]
"""(worker, step, row, time_s) -> seconds; see `Latency.sampler`."""

# The largest value that seeds.uniform returns.
TOP = 1.0 - 2.0**-53


class Latency(ABC):
    """How long one ticket takes on one worker, as a pure function of seed, worker, step, row and time."""

    name: ClassVar[str]
    form: ClassVar[str]
    example: ClassVar[str]

    @classmethod
    def usage(cls) -> str:
        """The remedy at the end of an error message."""
        return f"write {cls.form}, for example {cls.example}"

    @abstractmethod
    def sampler(self, seed: int, workers: int) -> Draw:
        """The draw for workers 0 … workers-1: `draw(worker, step, row, time_s) -> seconds`.

        step: the number of tickets that the worker started before. row: equal for all workers of one synchronous
        round. time_s: the start of the ticket. Draws do not depend on the order of the calls.
        """

    @abstractmethod
    def text(self) -> str:
        """The canonical text form: `parse_latency(x.text()) == x`."""

    def mean(self) -> float | None:
        """Mean seconds of a ticket over all draws; math.inf where infinite.

        None where it depends on the run: on the policy (slow workers), on start times (spells, changes), or on the
        times drawn for censored tickets (traces).
        """
        return None

    @abstractmethod
    def longest(self) -> float:
        """Upper bound of all draws, in seconds."""

    def refuse_endless(self) -> None:
        """Refuse a model that can draw infinite times. Called by constructors, before a run can draw one."""
        try:
            longest = self.longest()
        except OverflowError:
            longest = math.inf
        if not math.isfinite(longest):
            raise BadInput(
                f"{self.text()} can draw times beyond the largest float; make its times, spread or factors smaller"
            )


class Independent(Latency):
    """Independent draws from one distribution: worker, row and time make no difference."""

    @abstractmethod
    def inverse(self) -> Callable[[float], float]:
        """The quantile function on (0, 1). It does not check its argument, since it runs once per ticket."""

    def upper_inverse(self) -> Callable[[float], float]:
        """v -> the time exceeded with probability v; exact even where 1 - v would round to 1."""
        inverse = self.inverse()
        return lambda v: inverse(min(1.0 - v, TOP))

    def kinks(self) -> tuple[float, ...]:
        """The levels inside (0, 1) where the quantile function bends or jumps; integrals are split there."""
        return ()

    def quantile(self, u: float) -> float:
        """The u-quantile in seconds, 0 < u < 1."""
        check_level(u)
        return self.inverse()(u)

    def longest(self) -> float:
        return self.inverse()(TOP)

    def sampler(self, seed: int, workers: int) -> Draw:
        inverse = self.inverse()
        keys = [derive(seed, "latency", worker) for worker in range(workers)]

        def draw(worker: int, step: int, _row: int, _time_s: float) -> float:
            return inverse(uniform(keys[worker], step))

        return draw


def check_level(u: float) -> None:
    if not 0.0 < u < 1.0:
        raise BadInput(f"level {u!r} is not between 0 and 1; give a share such as 0.5 for the median")


def check_number(
    kind: type[Latency], field: str, value: object, *, least: float = 0.0, above: bool = False, most: float = math.inf
) -> None:
    """Refuse a field that is not a finite number in [least, most], or in (least, most] with above=True."""
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (least < value <= most or (value == least and not above))
    ):
        return
    rule = f"above {least:g}" if above else f"at least {least:g}"
    if most != math.inf:
        rule += f" and at most {most:g}"
    raise BadInput(f"{field} of {kind.name} is {value!r}, but must be a finite number {rule}; {kind.usage()}")


def number_text(value: float) -> str:
    """The shortest text that parses to the same float."""
    return repr(float(value)).removesuffix(".0")


def numbers_text(*values: float) -> str:
    return ",".join(map(number_text, values))
