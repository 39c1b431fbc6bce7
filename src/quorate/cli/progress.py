"""Progress of a run on stderr: a bar on a terminal, a line every few seconds elsewhere.

A run reports every update, 100,000 a second and more, so a reporter checks the clock before it does anything else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

from quorate.events import Ticket
from quorate.trace import Recorder

if TYPE_CHECKING:
    from rich.progress import TaskID

    from quorate.run import Progress


REDRAW_S, LINE_S = 0.1, 5.0
_BAR_COLUMNS = ("share", "updates", "pace", "loss", "dropped", "left", "missing")


class Reporter:
    """Receives every update of one run after the other.

    This base class shows nothing, but keeps the last progress for the message at Ctrl-C.
    """

    every_s = LINE_S

    def __init__(self) -> None:
        self.last: Progress | None = None
        self.real = False  # whether the seconds of the run are real
        self._label = ""
        self._first: Progress | None = None
        self._first_at = self._next_at = 0.0
        self._missing = ""  # "3 of 4 workers", if some are missing

    def begin(self, label: str, starting: str | None = None) -> None:
        """A run begins; `starting` is a text about the workers that start, if they are real."""
        self._label = label
        self.last = self._first = None
        self.real = starting is not None
        self._missing = ""
        self._next_at = time.monotonic() + self.every_s

    def started(self) -> None:
        """The workers are ready."""

    def workers_alive(self, alive: int, wanted: int) -> None:
        self._missing = f"{alive} of {wanted} workers" if alive < wanted else ""

    def __call__(self, progress: Progress) -> None:
        self.last = progress
        now = time.monotonic()
        if self._first is None:
            # The pace counts from the first update: workers take a while to start, and a resumed run has a past.
            self._first, self._first_at = progress, now
        if now >= self._next_at:
            self._next_at = now + self.every_s
            self._show(progress, now)

    def _show(self, progress: Progress, now: float) -> None:
        pass

    def _updates_per_s(self, progress: Progress, now: float) -> float | None:
        assert self._first is not None
        elapsed_s = now - self._first_at
        return (progress.updates - self._first.updates) / elapsed_s if elapsed_s > 0 else None

    def _left(self, progress: Progress, now: float) -> str:
        """Estimated time left; empty if unknown."""
        assert self._first is not None
        elapsed_s = now - self._first_at
        if progress.share is None or self._first.share is None or elapsed_s < 1:
            return ""
        done = progress.share - self._first.share
        return clock_time(elapsed_s * (1 - progress.share) / done) if done > 0 else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class AliveWorkers(Recorder):
    """Tells a reporter when the workers are ready, which is when recording starts, and how many are alive."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._alive: set[int] = set()
        self._wanted = 0

    def run(self, header: dict[str, Any]) -> None:
        self._wanted = header["workers"]
        self._reporter.started()

    def resumed(self, time: float, version: int, limits: dict[str, Any]) -> None:
        self._alive.clear()

    def joined(self, time: float, worker: int, incarnation: int) -> None:
        self._alive.add(worker)
        self._reporter.workers_alive(len(self._alive), self._wanted)

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        self._alive.discard(worker)
        self._reporter.workers_alive(len(self._alive), self._wanted)


def reporter(quiet: bool) -> Reporter:
    """A silent reporter, a bar on a terminal, or lines elsewhere."""
    if quiet:
        return Reporter()
    return Bar() if sys.stderr.isatty() else Lines()


class Lines(Reporter):
    """A line every five seconds."""

    def begin(self, label: str, starting: str | None = None) -> None:
        super().begin(label, starting)
        if starting is not None:
            self._write(starting)

    def _show(self, progress: Progress, now: float) -> None:
        share = "" if progress.share is None else f"{progress.share:.0%}, "
        pace, left = self._updates_per_s(progress, now), self._left(progress, now)
        self._write(
            f"{share}{progress.updates:,} updates{'' if pace is None else f' ({pace:,.0f}/s)'}, "
            f"{progress.seconds:.4g} s{'' if self.real else ' virtual'}"
            f"{'' if progress.loss is None else f', loss {progress.loss:.3g}'}, "
            f"dropped {progress.drop_rate:.0%}{f', {left} left' if left else ''}"
            f"{f', {self._missing}' if self._missing else ''}"
        )

    def _write(self, line: str) -> None:
        sys.stderr.write(f"{self._label}: {line}\n")
        sys.stderr.flush()


class Bar(Reporter):
    """A bar per run, redrawn ten times a second and removed at the end of the command."""

    every_s = REDRAW_S

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console, RenderableType
        from rich.constrain import Constrain
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        screen = Console(stderr=True)

        class Display(RichProgress):
            def get_renderables(self) -> Iterator[RenderableType]:
                # Leave room for the ^C that a terminal writes after the bar; on a line of its own it would remain.
                yield Constrain(self.make_tasks_table(self.tasks), screen.width - len("^C") - 1)

        def text(template: str, justify: Literal["left", "right"] = "right") -> TextColumn:
            return TextColumn(template, style="default", justify=justify, table_column=Column(no_wrap=True))

        self._task: TaskID | None = None
        self._display = Display(
            text("{task.description}", "left"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=1)),
            *(text(f"{{task.fields[{name}]}}") for name in _BAR_COLUMNS),
            console=screen,
            auto_refresh=False,  # no thread: updates of the run trigger the drawing
            transient=True,
            expand=True,
        )

    def begin(self, label: str, starting: str | None = None) -> None:
        if self._task is not None:
            if self.last is not None:
                self._show(self.last, time.monotonic())
            self._display.update(self._task, total=1.0, completed=1.0, share="100%", left="done")
        super().begin(label, starting)
        columns: dict[str, Any] = {**dict.fromkeys(_BAR_COLUMNS, ""), "updates": starting or ""}
        self._task = self._display.add_task(label, total=None, **columns)
        self._display.refresh()

    def started(self) -> None:
        assert self._task is not None
        self._display.update(self._task, updates="no update yet")
        self._display.refresh()

    def workers_alive(self, alive: int, wanted: int) -> None:
        super().workers_alive(alive, wanted)
        if self.last is not None:  # a run that waits for workers reports no update
            assert self._task is not None
            self._display.update(self._task, missing=self._missing)
            self._display.refresh()

    def _show(self, progress: Progress, now: float) -> None:
        assert self._task is not None
        share, rate = progress.share, self._updates_per_s(progress, now)
        pace = "" if rate is None else f"{rate:,.0f}/s"
        self._display.update(
            self._task,
            total=None if share is None else 1.0,
            completed=share or 0.0,
            share="" if share is None else f"{share:.0%}",
            updates=f"{progress.updates:,} updates",
            pace=f"{progress.seconds:,.0f} s" if self.real else pace,
            loss="" if progress.loss is None else f"loss {progress.loss:.3f}",
            dropped=f"drop {progress.drop_rate:.0%}",
            left=self._left(progress, now),
            missing=self._missing,
        )
        self._display.refresh()

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._display.stop()


def starting(workers: int, engine: str) -> str:
    """The text until the workers are ready."""
    some = "a worker" if workers == 1 else f"{workers} workers"
    return f"starting {some} on Ray" if engine == "ray" else f"starting {some}"


def clock_time(seconds: float) -> str:
    """Minutes and seconds, with hours if there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
