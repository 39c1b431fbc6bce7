"""Which rate makes communication take a given share of computation, and what a measured time says about a link."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

CLOSE_ENOUGH = 0.04
_MOST_TRIES = 5
_HEADERS = 1.05  # Ethernet, IP and TCP headers with 1,500-byte packets, and the ring's waits between its steps


class Calibrated(NamedTuple):
    rate_bits_per_s: float | None  # None: no limit
    communication_s: float  # measured at that rate


def wire_bytes(parameter_bytes: int, hosts: int) -> float:
    """What each host sends in a ring all-reduce: 2 (n-1)/n of the size."""
    return 2 * (hosts - 1) / hosts * parameter_bytes


def first_rate(sent_bytes: float, wanted_s: float) -> float:
    return 8 * _HEADERS * sent_bytes / wanted_s


def next_rate(rate: float, measured_s: float, fixed_s: float, wanted_s: float) -> float:
    """A better rate, from what this one gave: the time above the fixed part goes with the inverse of the rate."""
    return rate * max(measured_s - fixed_s, 0.1 * measured_s) / (wanted_s - fixed_s)


def calibrate(measure_s: Callable[[float | None], float], sent_bytes: float, wanted_s: float) -> Calibrated:
    """Search the rate at which communication takes `wanted_s`; `measure_s(rate)` measures it.

    Where even the machine without a limit takes longer, that is what there is; the figures say so.
    """
    fixed_s = measure_s(None)
    if fixed_s >= wanted_s:
        return Calibrated(None, fixed_s)
    rate = first_rate(sent_bytes, wanted_s)
    found: list[Calibrated] = []
    for _ in range(_MOST_TRIES):
        found.append(Calibrated(rate, measure_s(rate)))
        if abs(found[-1].communication_s / wanted_s - 1) <= CLOSE_ENOUGH:
            break
        rate = next_rate(rate, found[-1].communication_s, fixed_s, wanted_s)
    return min(found, key=lambda one: abs(one.communication_s / wanted_s - 1))


def achieved(sent_bytes: float, communication_s: float, rate_bits_per_s: float) -> float:
    """The share of the nominal rate that the all-reduce made use of."""
    return 8 * sent_bytes / communication_s / rate_bits_per_s
