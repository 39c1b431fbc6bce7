"""Numbers for people: three digits and a unit, never an exponent."""

from __future__ import annotations

import math


def three(value: float) -> str:
    """Three digits, with trailing zeros."""
    if not math.isfinite(value):
        return "infinite"
    if abs(value) >= 1e15:
        return "over 10^15"
    if 0 < abs(value) < 0.001:
        return "under 0.001"
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:,.0f}"


def number(value: float) -> str:
    """Three digits, without trailing zeros."""
    text = three(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """A share in percent, with two digits: 0.4%, 5.1%, 54%."""
    if 0 < abs(share) < 1e-5:
        return "under 0.001%"
    return f"{100 * share:.2g}%" if abs(share) < 0.0995 else f"{number(round(100 * share))}%"


def seconds(value: float | None) -> str:
    """A time with its unit."""
    if value is None:
        return "–"
    if value < 1e-6:
        return "0 s"
    if value < 0.9995:  # from here on, three digits round to 1.00 s
        return f"{three(value * 1e3)} ms" if value >= 0.9995e-3 else f"{three(value * 1e6)} µs"
    return f"{three(value)} s"


def duration(value: float) -> str:
    """A duration with its unit: hours from one hour on."""
    hours = value / 3600
    if not math.isfinite(value) or hours < 1:
        return seconds(value) if math.isfinite(value) else "infinite"
    return f"{hours:.1f} h" if hours < 1000 else f"{three(hours)} h"


def byte_size(size: float) -> str:
    """A size with its unit."""
    units = ["TB", "GB", "MB", "kB", "B"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop()
    return f"{three(size)} {units[-1]}"
