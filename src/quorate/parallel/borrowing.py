"""One process's side of lending: what it was lent, what it holds, when to ask, when a pass is over.

It knows no threads and sends nothing: messages in, what to do out. `quorate.Sampler` waits and sends.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any, NamedTuple


class Lent(NamedTuple):
    """A batch that this process may compute."""

    batch: int
    epoch: int
    version: int | None  # not to be computed on an older version than this


class Now(Enum):
    """What to do instead of taking a batch."""

    WAIT = "a batch may still come"
    END = "the pass is over"


class Borrowing:
    """What a process has been lent, by the messages it got."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch  # of the pass that is under way, or comes next
        self._ready: deque[Lent] = deque()
        self._held: deque[Lent] = deque()  # handed out, and not over yet
        self._lent = 0  # in all
        self._epoch_over = -1
        self._over = False
        self._ask = 0  # number of the last question
        self._none_for = 0  # number of the last question that was answered with "none"
        self._asked_total = 0

    # ------------------------------------------------------------ messages

    def heard(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "lent":
            self._lent += 1
            self._ready.append(Lent(message["batch"], message["epoch"], message["version"]))
        elif kind == "none":
            self._none_for = max(self._none_for, message["ask"])
        elif kind == "epoch_over":
            self._epoch_over = max(self._epoch_over, message["epoch"])
        elif kind == "over":
            self._over = True

    def question(self, ahead: int = 0) -> dict[str, Any] | None:
        """What to send so that, beyond what is there, so many more come; None: that was asked already."""
        total = self._lent + 1 + ahead - len(self._ready)
        if total <= self._lent or (total <= self._asked_total and self._none_for < self._ask):
            return None
        self._ask += 1
        self._asked_total = total
        return {"total": total, "epoch": self.epoch, "ask": self._ask}

    # ------------------------------------------------------------ batches

    @property
    def in_hand(self) -> int | None:
        """The batch that is computed now, or next."""
        return self._held[0].batch if self._held else None

    def begin_pass(self) -> None:
        """What was handed out and never computed, because the last pass was left, is handed out again."""
        self._ready.extendleft(reversed(self._held))
        self._held.clear()

    def take(self) -> Lent | Now:
        """The next batch of the pass. One that waits while it holds a batch might wait for itself, so it never does."""
        if self._over:
            return Now.END
        if self._ready:
            if self._ready[0].epoch > self.epoch:
                return self._end_pass()
            lent = self._ready.popleft()
            self._held.append(lent)
            return lent
        if self._epoch_over >= self.epoch:
            return self._end_pass()
        if self._held and self._ask > 0 and self._none_for == self._ask:
            return self._end_pass()
        return Now.WAIT

    def _end_pass(self) -> Now:
        self.epoch += 1
        return Now.END

    def computed(self) -> bool:
        """The batch in hand is over, used or not. False: there was none."""
        if not self._held:
            return False
        self._held.popleft()
        return True
