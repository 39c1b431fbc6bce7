"""Where the seconds of an iteration went, seen from the script's own thread."""

from __future__ import annotations

import time


class Stopwatch:
    """From one `step()` to the next: until the first forward it is data, then computing; what was waited is neither."""

    def __init__(self) -> None:
        self._ended = time.monotonic()
        self._began: float | None = None
        self._waited_before = 0.0

    def begin(self, waited_s: float) -> None:
        """The first forward of an iteration. `waited_s`: seconds waited for updates, so far in all."""
        if self._began is None:
            self._began, self._waited_before = time.monotonic(), waited_s

    def end(self, waited_s: float) -> dict[str, float]:
        """`step()` is called: the parts of this iteration."""
        now = time.monotonic()
        began = now if self._began is None else self._began
        waited = 0.0 if self._began is None else waited_s - self._waited_before
        return {
            "data_s": max(0.0, began - self._ended),
            "compute_s": max(0.0, now - began - waited),
            "transfer_s": max(0.0, waited),
        }

    def restart(self) -> None:
        """`step()` returns."""
        self._ended, self._began = time.monotonic(), None
