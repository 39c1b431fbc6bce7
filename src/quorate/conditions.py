"""Conditions on a run, such as `accuracy>=0.95`: when it ends, or what it is to reach."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from quorate.errors import BadInput, close_to
from quorate.trace import Recorder, Update


class Until(NamedTuple):
    """A condition on a run, e.g. `accuracy>=0.95` or `seconds>=3600`; checked when its value is known."""

    name: str
    relation: str
    target: float

    def holds(self, values: Mapping[str, float]) -> bool:
        value = values.get(self.name)
        if value is None or math.isnan(value):
            return False
        return value >= self.target if self.relation == ">=" else value <= self.target

    def text(self) -> str:
        return f"{self.name}{self.relation}{self.target!r}"


def parse_until(text: str) -> Until:
    match = re.fullmatch(r"\s*([A-Za-z_][\w./ -]*?)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*", text)
    if match is None:
        raise BadInput(f"until {text!r} is not understood; write e.g. 'accuracy>=0.95', 'loss<=0.1' or 'seconds>=60'")
    return Until(match[1], match[2], float(match[3]))


class KnownMeasure(Recorder):
    """Refuses a condition on a value that the task does not measure: it would never hold, and the run never end."""

    def __init__(self, condition: Until, *, ends_run: bool) -> None:
        self._condition = condition
        self._always = ("loss", "samples", "seconds", "updates") if ends_run else ()
        self._measured_by = 0  # version by which an evaluation must have come

    def run(self, header: dict[str, Any]) -> None:
        self._measured_by = header["evaluate_every"]

    def applied(self, time: float, update: Update) -> None:
        if update.version > self._measured_by:  # the task gave no measures, so it never will
            self._check(())

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        self._check(tuple(measures))

    def _check(self, measured: tuple[str, ...]) -> None:
        check_known(self._condition, (*measured, *self._always), "the task")
        self._measured_by = 2**62


def check_known(condition: Until, known: tuple[str, ...], who: str) -> None:
    if condition.name in known:
        return
    if not known:
        raise BadInput(
            f"{condition.text()} cannot be measured: the task has no evaluate() that gives {condition.name!r}"
        )
    names = ", ".join(sorted(known))
    guess = close_to(condition.name, known)
    raise BadInput(
        f"{condition.text()} cannot be measured: {who} gives no {condition.name!r}{guess}; choose one of: {names}"
    )
