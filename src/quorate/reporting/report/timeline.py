"""What every worker did, when: an outline of the whole run, and every ticket of some stretches of it.

The outline has a bounded number of bins of time; when the run outgrows them, two become one. Tickets are kept in
stretches: the first, the last, and between them those with the slowest updates. A run that fits is kept whole.
"""

from __future__ import annotations

import base64
import heapq
import sys
from array import array
from collections import deque
from typing import Any

USED, DROPPED, CANCELLED, LOST, GONE, OPEN = range(6)
KINDS = ("used", "dropped", "cancelled", "lost", "gone", "open")
#: The outline has a lane for each kind but the last: what is still open belongs to a later stretch.
LANES = KINDS[:OPEN]
BINS = 1024
MOST_ROWS = 256
_STRETCH = 5000  # segments
_MOMENT = 12  # updates of the beginning and of the end that are worth a look


class Outline:
    """Seconds of each lane, by row and bin of time."""

    def __init__(self) -> None:
        self.width_s = 1e-9  # of a bin; doubling is free while there is nothing in them
        self.end_s = 0.0
        self._bins: list[dict[int, array[float]]] = [{} for _ in LANES]

    def add(self, lane: int, row: int, start: float, end: float) -> None:
        while end >= self.width_s * BINS:
            self._double()
        self.end_s = max(self.end_s, end)
        width = self.width_s
        bins = self._bins[lane].get(row)
        if bins is None:
            bins = self._bins[lane][row] = array("d", bytes(8 * BINS))
        first, last = int(start / width), int(end / width)
        if first == last:
            bins[first] += end - start
            return
        bins[first] += (first + 1) * width - start
        for middle in range(first + 1, last):
            bins[middle] += width
        bins[last] += end - last * width

    def _double(self) -> None:
        self.width_s *= 2
        for rows in self._bins:
            for row, bins in rows.items():
                halved = array("d", [one + other for one, other in zip(bins[::2], bins[1::2], strict=True)])
                halved.frombytes(bytes(8 * (BINS // 2)))
                rows[row] = halved

    def data(self, rows: int, workers_per_row: int, workers: int) -> dict[str, Any]:
        """Shares of a row's time in 255ths, packed: lane by lane, row by row, bin by bin."""
        count = min(BINS, int(self.end_s / self.width_s) + 1)
        empty = bytes(count)
        packed = bytearray()
        for lane in self._bins:
            for row in range(rows):
                bins = lane.get(row)
                if bins is None:
                    packed += empty
                    continue
                in_row = min(workers_per_row, workers - row * workers_per_row)
                scale = 255 / (self.width_s * max(1, in_row))
                packed += bytes(min(255, round(seconds * scale)) for seconds in bins[:count])
        return {"width_s": self.width_s, "bins": count, "lanes": LANES, "shares": _base64(bytes(packed))}


class Stretch:
    """Every segment that ended in some time."""

    def __init__(self, start: float) -> None:
        self.start = self.end = start
        self.slowest_s = 0.0  # the longest that an update took in it
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
        """Times are counted from the stretch's start, so that 32 bits are enough."""
        starts = array("f", [start - self.start for start in self.starts])
        lengths = array("f", [end - start for start, end in zip(self.starts, self.ends, strict=True)])
        if sys.byteorder == "big":
            starts.byteswap()
            lengths.byteswap()
        return {
            "from": self.start,
            "to": self.end,
            "rows": _base64(self.rows.tobytes()),
            "kinds": _base64(self.kinds.tobytes()),
            "starts": _base64(starts.tobytes()),
            "lengths": _base64(lengths.tobytes()),
        }


class Timeline:
    """Rows of segments. More workers than rows are put together, some to a row, and then shown in outline only."""

    def __init__(self, workers: int, most_segments: int) -> None:
        self._workers = workers
        self._per_row = -(-workers // MOST_ROWS)
        self._rows = -(-workers // self._per_row)
        quarter = max(1, most_segments // _STRETCH // 4)
        self._outline = Outline()
        self._first: list[Stretch] = []
        self._most_first, self._most_slow = quarter, 2 * quarter
        self._last: deque[Stretch] = deque()
        self._slow: list[tuple[float, int, Stretch]] = []  # a heap: the least slow on top
        self._closed = 0
        self._stretch = Stretch(0.0)
        self._updates = 0
        self._last_update = 0.0
        self._slowest = (0.0, 0.0, 0)  # seconds, when it was made, version
        self._beginning = 0.0
        self._recent: deque[float] = deque(maxlen=_MOMENT)

    def add(self, worker: int, kind: int, start: float, end: float) -> None:
        row = worker // self._per_row
        if row >= self._rows:
            return  # a worker that the header does not know of
        self._outline.add(kind, row, start, end)
        if self._per_row == 1:
            self._stretch.add(row, kind, start, end)

    def updated(self, time: float) -> bool:
        """A version was made. Says whether a stretch is full: then tell what is in flight, and `close` it."""
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
        """Something whose end, or whose outcome, only a later stretch will know."""
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
        """Everything the page draws; call it when the run is over and the last stretch is closed."""
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
        """Stretches of time that are worth a look, by name."""
        if self._updates < 2 * _MOMENT:
            return []
        took_s, at, version = self._slowest
        return [
            {"name": "beginning", "from": 0.0, "to": self._beginning},
            {"name": f"slowest update ({version})", "from": max(0.0, at - 2 * took_s), "to": min(seconds, at + took_s)},
            {"name": "end", "from": self._recent[0], "to": max(seconds, self._recent[-1])},
        ]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
