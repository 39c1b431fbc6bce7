"""Follows a run in a thread, and always has the newest snapshot of it ready."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from quorate.errors import BadInput
from quorate.reporting.live.follower import Follower, trace_file
from quorate.reporting.live.snapshot import snapshot
from quorate.reporting.live.state import LiveMetrics
from quorate.reporting.plain import finite
from quorate.trace import Telling

ABSENT, READING, RUNNING, ENDED, UNREADABLE = "absent", "reading", "running", "ended", "unreadable"

_LOOK_S, _PUBLISH_S = 0.2, 0.5
_PACE_S = 30.0  # the time left is told from so much of the past
_BEHIND_BYTES = 1 << 23  # further back than that, reading is worth a word


class Published(NamedTuple):
    """A snapshot, as an object and as the bytes that are sent."""

    number: int  # grows with each that differs
    state_number: int  # grows only when the run itself has news
    content: dict[str, Any]
    body: bytes
    body_without_state: bytes  # for who has this state already: small


class Watcher:
    """Reads what a run writes and publishes what came of it, about twice a second."""

    def __init__(self, run: Path) -> None:
        self._follower = Follower(trace_file(run))
        self._metrics = LiveMetrics()
        self._telling = Telling(self._metrics)
        self._told = 0
        self._newest_s = 0.0  # of the run's own time
        self._caught_up = False
        self._problem: str | None = None
        self._grown_at = time.monotonic()
        self._past: deque[tuple[float, int, float]] = deque()  # (our clock, updates, share) since it caught up
        self._closing = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="quorate-watch", daemon=True)
        self.published = Published(0, 0, {"state": None}, b"", b"")

    @property
    def path(self) -> Path:
        return self._follower.path

    def __enter__(self) -> Watcher:
        self._read()
        self._publish()  # so that there is something to show at once
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        self._follower.close()

    def wait(self, after: int, timeout_s: float) -> Published:
        """The newest snapshot; waits a while for one that comes after this number."""
        with self._changed:
            self._changed.wait_for(lambda: self.published.number > after, timeout_s)
            return self.published

    # ------------------------------------------------------------ the thread

    def _follow(self) -> None:
        next_at = time.monotonic()
        while not self._closing.is_set():
            grew = self._read()
            now = time.monotonic()
            if now >= next_at:
                next_at = now + _PUBLISH_S
                self._publish()
            if not grew:
                self._closing.wait(_LOOK_S)

    def _read(self) -> bool:
        """Take in the next chunk; gives whether there was one."""
        before = self._follower.offset_bytes
        try:
            news = self._follower.read()
            if news.anew:
                self._begin_anew()
            if self._problem is not None:
                return False
            for record in news.records:
                self._telling.tell(record)
                self._told += 1
            if news.records:
                self._newest_s = news.records[-1].get("time", self._newest_s)
        except BadInput as error:
            self._problem = str(error)
            return False
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            self._problem = (
                f"trace {str(self.path)!r} is damaged at line {self._told + 1}; what is shown is the run up to there"
            )
            return False
        grew = self._follower.offset_bytes != before
        if grew:
            self._grown_at = time.monotonic()
        if self._follower.exists and self._follower.offset_bytes >= self._follower.size_bytes:
            self._caught_up = True
        return grew

    def _begin_anew(self) -> None:
        self._metrics = LiveMetrics()
        self._telling = Telling(self._metrics)
        self._told, self._newest_s = 0, 0.0
        self._caught_up, self._problem = False, None
        self._past.clear()

    def _publish(self) -> None:
        before = self.published
        content = self._content()
        state_number = before.state_number + (content["state"] != before.content["state"])
        content["state_number"] = state_number
        rest = _as_json({key: value for key, value in content.items() if key != "state"})
        if rest == before.body_without_state:
            return
        with self._changed:
            self.published = Published(before.number + 1, state_number, content, _as_json(content), rest)
            self._changed.notify_all()

    # ------------------------------------------------------------ what is published

    def _content(self) -> dict[str, Any]:
        follower = self._follower
        try:
            shown = snapshot(self._metrics) if self._metrics.header else None
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
        ):  # a header or a worker that is none
            self._problem = self._problem or f"trace {str(self.path)!r} is damaged; quorate did not write it so"
            shown = None
        return {
            "trace": str(self.path),
            "status": self._status(),
            "problem": self._problem,
            "read_share": follower.offset_bytes / follower.size_bytes if follower.size_bytes else 0.0,
            "records": self._told,
            "newest_s": finite(self._newest_s),
            "quiet_s": self._quiet_s(),
            "wall": self._wall(),
            "state": finite(shown),
        }

    def _status(self) -> str:
        if self._problem is not None:
            return UNREADABLE
        if self._metrics.ending is not None:
            return ENDED
        if not self._metrics.header and (not self._follower.exists or self._caught_up):
            return ABSENT
        behind = self._follower.size_bytes - self._follower.offset_bytes
        return RUNNING if self._caught_up and behind < _BEHIND_BYTES else READING

    def _quiet_s(self) -> int | None:
        """Whole seconds without news of a run that has not ended; a file found at the start tells its own age."""
        if self._status() != RUNNING:
            return None
        quiet_s = time.monotonic() - self._grown_at
        modified_at = self._follower.modified_at
        if modified_at is not None:
            quiet_s = max(quiet_s, time.time() - modified_at)
        return int(quiet_s)

    def _wall(self) -> dict[str, float | None]:
        """Pace and time left by our own clock, which for a simulated run is another than its own."""
        nothing: dict[str, float | None] = {"updates_per_s": None, "left_s": None}
        if self._status() != RUNNING:
            return nothing
        now, share = time.monotonic(), self._metrics.share()
        self._past.append((now, self._metrics.updates, share or 0.0))
        while now - self._past[0][0] > _PACE_S:
            self._past.popleft()
        since, updates, share_then = self._past[0]
        if now - since < 1.0:
            return nothing
        done = (share or 0.0) - share_then
        left_s = (1 - (share or 0.0)) * (now - since) / done if done > 0 else None
        return {"updates_per_s": (self._metrics.updates - updates) / (now - since), "left_s": left_s}


def _as_json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
