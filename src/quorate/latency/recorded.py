"""Times taken from the trace of an earlier run, so that a simulation meets the workers one really has."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

from quorate.errors import BadInput
from quorate.latency.base import Draw, Latency
from quorate.latency.censored import Beyond
from quorate.latency.durations import Duration, read_durations
from quorate.seeds import derive, uniform


@dataclass(frozen=True)
class Recorded(Latency):
    """Worker w's i-th ticket takes as long as it did in the trace; past the end, the record starts over.

    A ticket that was cancelled or lost is only known to have needed longer: it gets a time drawn from the
    longer ones of all workers, weighted as Kaplan and Meier do. A worker that the trace lacks takes the
    times of one that it has, begun elsewhere.
    """

    name: ClassVar[str] = "trace"
    form: ClassVar[str] = "trace:PATH"
    example: ClassVar[str] = "trace:runs/monday.jsonl"
    path: str
    durations: dict[int, list[Duration]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.path or self.path != self.path.strip() or "*" in self.path:
            raise BadInput(
                f"{self.path!r} is no path for a trace: it must not be empty, begin or end with a space, "
                f"or hold '*', which joins modifiers; rename the file and {self.usage()}"
            )
        object.__setattr__(self, "durations", read_durations(self.path))

    def sampler(self, seed: int, workers: int) -> Draw:
        beyond = Beyond(chain.from_iterable(self.durations.values()))
        tables: dict[int, list[float]] = {}
        for worker, durations in self.durations.items():
            key = derive(seed, "latency.censored", worker)
            tables[worker] = [
                seconds if observed else beyond.draw(seconds, uniform(key, i))
                for i, (seconds, observed) in enumerate(durations)
            ]
        known = sorted(tables)
        donors = [worker if worker in tables else known[worker % len(known)] for worker in range(workers)]
        seconds_of = [tables[donor] for donor in donors]
        counts = [len(table) for table in seconds_of]
        # A worker that borrows starts elsewhere in the record, or two would be slow in step.
        begins = [
            0 if worker == donor else derive(seed, "latency.borrowed", worker) % counts[worker]
            for worker, donor in enumerate(donors)
        ]

        def draw(worker: int, step: int, _row: int, _time_s: float) -> float:
            return seconds_of[worker][(step + begins[worker]) % counts[worker]]

        return draw

    def mean(self) -> None:
        """None: what stands in for the tickets that ended early depends on the seed."""

    def longest(self) -> float:
        return max(seconds for durations in self.durations.values() for seconds, _ in durations)

    def text(self) -> str:
        return f"trace:{self.path}"
