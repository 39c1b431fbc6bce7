"""The timeline of what each worker did, and the heat map of worker × update, in bounded memory.

The outline has a fixed number of time bins; when the run outgrows them, neighbouring bins are merged. Single tickets
are kept for some stretches of time: the first ones, the last ones, and in between those with the slowest updates. A run
that fits is kept whole.
"""

from __future__ import annotations

import base64
import heapq
import math
import sys
from array import array
from collections import deque
from typing import Any

USED, DROPPED, CANCELLED, LOST, GONE, OPEN = range(6)
KINDS = ("used", "dropped", "cancelled", "lost", "gone", "open")
#: Kinds in the outline. Open segments are left out, since they end in a later stretch.
OUTLINE_KINDS = KINDS[:OPEN]
BINS = 1024
MOST_ROWS = 256
_STRETCH = 5000  # segments
_MOMENT = 12  # updates shown as "beginning" and as "end"


def _rows_of(workers: int) -> tuple[int, int]:
    """Rows of a picture, and workers in each."""
    per_row = -(-workers // MOST_ROWS)
    return -(-workers // per_row), per_row


def _merged(cells: array[float]) -> array[float]:
    """Sums of neighbouring cells, followed by as many empty ones."""
    sums = array("d", map(sum, zip(cells[::2], cells[1::2], strict=True)))
    sums.frombytes(bytes(8 * len(sums)))
    return sums


def _base64(data: bytes | bytearray | array[Any]) -> str:
    return base64.b64encode(data).decode("ascii")


class Outline:
    """Seconds of each kind, by row and time bin."""

    def __init__(self) -> None:
        self.width_s = 1e-9  # of a bin; doubling costs nothing while the bins are empty
        self.end_s = 0.0
        self._bins: list[dict[int, array[float]]] = [{} for _ in OUTLINE_KINDS]

    def add(self, kind: int, row: int, start: float, end: float) -> None:
        while end >= self.width_s * BINS:
            self.width_s *= 2
            self._bins = [{row: _merged(bins) for row, bins in rows.items()} for rows in self._bins]
        self.end_s = max(self.end_s, end)
        width = self.width_s
        bins = self._bins[kind].get(row)
        if bins is None:
            bins = self._bins[kind][row] = array("d", bytes(8 * BINS))
        first, last = int(start / width), int(end / width)
        if first == last:
            bins[first] += end - start
            return
        bins[first] += (first + 1) * width - start
        for middle in range(first + 1, last):
            bins[middle] += width
        bins[last] += end - last * width

    def data(self, rows: int, workers_per_row: int, workers: int) -> dict[str, Any]:
        """Shares of a row's time in 255ths, packed by kind, then row, then bin."""
        count = min(BINS, int(self.end_s / self.width_s) + 1)
        empty = bytes(count)
        packed = bytearray()
        for bins_of_rows in self._bins:
            for row in range(rows):
                bins = bins_of_rows.get(row)
                if bins is None:
                    packed += empty
                    continue
                in_row = min(workers_per_row, workers - row * workers_per_row)
                scale = 255 / (self.width_s * max(1, in_row))
                packed += bytes(min(255, round(seconds * scale)) for seconds in bins[:count])
        return {"width_s": self.width_s, "bins": count, "kinds": OUTLINE_KINDS, "shares": _base64(packed)}


class Stretch:
    """All segments that ended in one interval of time."""

    def __init__(self, start: float) -> None:
        self.start = self.end = start
        self.slowest_s = 0.0  # longest update in it
        self.rows = array("B")
        self.kinds = array("B")
        self.starts = array("d")
        self.ends = array("d")

    def add(self, row: int, kind: int, start: float, end: float) -> None:
        self.rows.append(row)
        self.kinds.append(kind)
        self.starts.append(start)
        self.ends.append(end)

    def data(self) -> dict[str, Any]:
        """JSON values. Times are relative to the start of the stretch, so that 32 bits are enough."""
        starts = array("f", [start - self.start for start in self.starts])
        lengths = array("f", [end - start for start, end in zip(self.starts, self.ends, strict=True)])
        if sys.byteorder == "big":
            starts.byteswap()
            lengths.byteswap()
        columns: dict[str, array[Any]] = {"rows": self.rows, "kinds": self.kinds, "starts": starts, "lengths": lengths}
        return {"from": self.start, "to": self.end, **{name: _base64(column) for name, column in columns.items()}}


class Timeline:
    """Rows of segments. If there are more workers than rows, several share a row, and only the outline is kept."""

    def __init__(self, workers: int, most_segments: int) -> None:
        self._workers = workers
        self._rows, self._per_row = _rows_of(workers)
        quarter = max(1, most_segments // _STRETCH // 4)
        self._outline = Outline()
        self._first: list[Stretch] = []
        self._most_first, self._most_slow = quarter, 2 * quarter
        self._last: deque[Stretch] = deque()
        self._slow: list[tuple[float, int, Stretch]] = []  # heap with the least slow on top
        self._closed = 0
        self._stretch = Stretch(0.0)
        self._updates = 0
        self._last_update = 0.0
        self._slowest = (0.0, 0.0, 0)  # seconds, time, version
        self._beginning = 0.0
        self._recent: deque[float] = deque(maxlen=_MOMENT)

    def add(self, worker: int, kind: int, start: float, end: float) -> None:
        row = worker // self._per_row
        if row >= self._rows:
            return  # a worker that is not in the header
        self._outline.add(kind, row, start, end)
        if self._per_row == 1:
            self._stretch.add(row, kind, start, end)

    def updated(self, time: float) -> bool:
        """A version was made. Returns whether the stretch is full: then add the open tickets, and `close` it."""
        took_s = time - self._last_update
        self._last_update = time
        self._updates += 1
        self._recent.append(time)
        if self._updates <= _MOMENT:
            self._beginning = time
        stretch = self._stretch
        stretch.slowest_s = max(stretch.slowest_s, took_s)
        if took_s > self._slowest[0]:
            self._slowest = (took_s, time, self._updates)
        return len(stretch.rows) >= _STRETCH

    def add_open(self, worker: int, start: float, end: float) -> None:
        """A ticket whose end or outcome is only known in a later stretch."""
        row = worker // self._per_row
        if self._per_row == 1 and row < self._rows:
            self._stretch.add(row, OPEN, start, end)

    def close(self, time: float) -> None:
        stretch, self._stretch = self._stretch, Stretch(time)
        stretch.end = time
        if not stretch.rows:
            return
        self._closed += 1
        if len(self._first) < self._most_first:
            self._first.append(stretch)
            return
        self._last.append(stretch)
        if len(self._last) > self._most_first:
            older = self._last.popleft()
            heapq.heappush(self._slow, (older.slowest_s, self._closed, older))
            if len(self._slow) > self._most_slow:
                heapq.heappop(self._slow)

    def data(self, seconds: float) -> dict[str, Any]:
        """JSON values for the page; call it after the last stretch is closed."""
        kept = [*self._first, *(entry[2] for entry in self._slow), *self._last]
        kept.sort(key=lambda stretch: stretch.start)
        return {
            "rows": self._rows,
            "workers_per_row": self._per_row,
            "seconds": max(seconds, self._outline.end_s),
            "kinds": KINDS,
            "outline": self._outline.data(self._rows, self._per_row, self._workers),
            "stretches": [stretch.data() for stretch in kept],
            "segments": sum(len(stretch.rows) for stretch in kept),
            "whole": len(kept) == self._closed and self._per_row == 1,
            "moments": self._moments(seconds),
        }

    def _moments(self, seconds: float) -> list[dict[str, Any]]:
        """Named intervals of interest."""
        if self._updates < 2 * _MOMENT:
            return []
        took_s, at, version = self._slowest
        return [
            {"name": "beginning", "from": 0.0, "to": self._beginning},
            {"name": f"slowest update ({version})", "from": max(0.0, at - 2 * took_s), "to": min(seconds, at + took_s)},
            {"name": "end", "from": self._recent[0], "to": max(seconds, self._recent[-1])},
        ]


_COLUMNS = 256
#: A cell is one byte: 0 for no ticket, else the logarithm of its time relative to the usual, scaled to this range.
LEAST_RATIO, MOST_RATIO = 0.5, 8.0


class HeatMap:
    """Mean ticket seconds by row of workers and column of versions; columns are merged as the run grows."""

    def __init__(self, workers: int) -> None:
        self._rows, self._per_row = _rows_of(workers)
        self._width = 1  # versions in a column
        self._last = -1
        self._sums: dict[int, array[float]] = {}
        self._counts: dict[int, array[float]] = {}

    def add(self, worker: int, version: int, seconds: float) -> None:
        row = worker // self._per_row
        if row >= self._rows or version < 0:
            return  # a worker that is not in the header
        while version >= self._width * _COLUMNS:
            self._width *= 2
            self._sums, self._counts = (
                {at: _merged(cells) for at, cells in kept.items()} for kept in (self._sums, self._counts)
            )
        self._last = max(self._last, version)
        column = version // self._width
        for kept, value in ((self._sums, seconds), (self._counts, 1.0)):
            cells = kept.get(row) or kept.setdefault(row, array("d", bytes(8 * _COLUMNS)))
            cells[column] += value

    def data(self, usual_s: float | None) -> dict[str, Any] | None:
        """JSON values; None if there is no ticket."""
        if not usual_s or self._last < 0:
            return None
        columns = self._last // self._width + 1
        packed = bytearray(self._rows * columns)
        span = math.log(MOST_RATIO / LEAST_RATIO)
        for row, counts in self._counts.items():
            for column, count in enumerate(counts[:columns]):
                if count:
                    ratio = max(self._sums[row][column] / count / usual_s, LEAST_RATIO)
                    packed[row * columns + column] = 1 + min(254, round(254 * math.log(ratio / LEAST_RATIO) / span))
        return {
            "rows": self._rows,
            "workers_per_row": self._per_row,
            "columns": columns,
            "versions": self._width,
            "usual_s": usual_s,
            "ratios": [LEAST_RATIO, MOST_RATIO],
            "cells": _base64(packed),
        }
