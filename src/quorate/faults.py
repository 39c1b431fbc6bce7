"""Scripted faults: one language for every engine and test. Parts are joined by `;`.

lose:3@10      worker 3 is lost at 10 s
join:3@25      worker 3 comes back at 25 s, or joins as a new worker
crash:100,5    every worker is lost at random, once in 100 s on average, and comes back after 5 s
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from quorate.errors import BadInput
from quorate.seeds import derive, uniform

_FORM = "lose:3@10;join:3@25;crash:100,5"


@dataclass(frozen=True)
class Fault:
    """One worker is lost or joins at a given time."""

    time: float
    worker: int
    kind: str  # "lose" or "join"


@dataclass(frozen=True)
class Faults:
    """When workers are lost and join: a fixed script, random crashes, or both."""

    script: tuple[Fault, ...] = ()
    crash_every_s: float | None = None  # mean time between crashes of one worker
    down_s: float = 0.0  # how long a crashed worker is away
    source: str = field(default="", compare=False)

    def crashes(self, seed: int, worker: int) -> Iterator[Fault]:
        """The endless sequence of a worker's random crashes and returns; the same for the same seed."""
        if self.crash_every_s is None:
            return
        key = derive(seed, "crash", worker)
        time, index = 0.0, 0
        while True:
            time += -self.crash_every_s * math.log(uniform(key, index))
            yield Fault(time, worker, "lose")
            time += self.down_s
            yield Fault(time, worker, "join")
            index += 1


def parse_faults(text: str) -> Faults:
    """The faults of a text such as `lose:3@10;join:3@25`."""
    script: list[Fault] = []
    crash: tuple[float | None, float] = None, 0.0
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        one = re.fullmatch(r"(lose|join):(\d+)@(\d+\.?\d*|\.\d+)", part)
        every = re.fullmatch(r"crash:(\d+\.?\d*|\.\d+),(\d+\.?\d*|\.\d+)", part)
        try:
            if one:
                script.append(Fault(float(one[3]), int(one[2]), one[1]))
            elif every and float(every[1]) > 0:
                crash = float(every[1]), float(every[2])
            else:
                raise ValueError(part)
        except ValueError:
            raise BadInput(f"faults {text!r}: {part!r} is not understood; write e.g. {_FORM}") from None
    return Faults(tuple(sorted(script, key=lambda fault: fault.time)), *crash, source=text)
