"""How far a run is, on stderr: a bar on a terminal, a line now and then elsewhere.

A run reports after every update, at 100,000 a second and more, so the first thing done is to look at the clock.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from quorate.events import Ticket
from quorate.trace import Recorder

if TYPE_CHECKING:
    from rich.progress import TaskID

    from quorate.running import Progress

REDRAW_S, LINE_S = 0.1, 5.0


class Reporter(Protocol):
    """Told of every update of one run after the other."""

    last: Progress | None
    real: bool  # whether the run's seconds are

    def begin(self, label: str, starting: str | None = None) -> None:
        """A run begins; `starting` says which workers are being started, where they are real."""

    def started(self) -> None:
        """The workers are there."""

    def attended(self, alive: int, wanted: int) -> None:
        """So many workers are there now."""

    def __call__(self, progress: Progress) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Attendance(Recorder):
    """Tells a reporter when the workers are there, and how many: a run is recorded from then on."""

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
        self._reporter.attended(len(self._alive), self._wanted)

    def lost(self, time: float, worker: int, tickets: tuple[Ticket, ...]) -> None:
        self._alive.discard(worker)
        self._reporter.attended(len(self._alive), self._wanted)


def reporter(quiet: bool) -> Reporter:
    """The kind that suits where stderr goes."""
    if quiet:
        return Silence()
    return Bar() if sys.stderr.isatty() else Lines()


class Silence:
    """Shows nothing, but remembers how far the run is, for the sentence at Ctrl-C."""

    every_s = LINE_S

    def __init__(self) -> None:
        self.last: Progress | None = None
        self.real = False
        self._label = ""
        self._first: Progress | None = None
        self._first_at = self._next_at = 0.0
        self._missing = ""  # how many workers are there, where that is not all of them

    def begin(self, label: str, starting: str | None = None) -> None:
        self._label = label
        self.last = self._first = None
        self.real = starting is not None
        self._missing = ""
        self._next_at = time.monotonic() + self.every_s

    def started(self) -> None:
        pass

    def attended(self, alive: int, wanted: int) -> None:
        self._missing = f"{alive} of {wanted} workers" if alive < wanted else ""

    def __call__(self, progress: Progress) -> None:
        self.last = progress
        now = time.monotonic()
        if self._first is None:
            # The pace is counted from here: workers take a while to start, and a resumed run has a past.
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
        """How long it will take at this pace; nothing where that is unknown."""
        assert self._first is not None
        elapsed_s = now - self._first_at
        if progress.share is None or self._first.share is None or elapsed_s < 1:
            return ""
        done = progress.share - self._first.share
        return clock_time(elapsed_s * (1 - progress.share) / done) if done > 0 else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Lines(Silence):
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


class Bar(Silence):
    """A bar per run, redrawn ten times a second; it goes when the command is done."""

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
                # Room for the ^C that a terminal writes after the bar: in a line of its own it would stay there.
                yield Constrain(self.make_tasks_table(self.tasks), screen.width - len("^C") - 1)

        def text(template: str, justify: str = "right") -> TextColumn:
            return TextColumn(
                template,
                style="default",
                justify="left" if justify == "left" else "right",
                table_column=Column(no_wrap=True),
            )

        self._task: TaskID | None = None
        fields = ("share", "updates", "pace", "loss", "dropped", "left", "missing")
        self._display = Display(
            text("{task.description}", "left"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=1)),
            *(text(f"{{task.fields[{name}]}}") for name in fields),
            console=screen,
            auto_refresh=False,  # no thread: the run itself says when there is something new
            transient=True,
            expand=True,
        )

    def begin(self, label: str, starting: str | None = None) -> None:
        if self._task is not None:
            if self.last is not None:
                self._show(self.last, time.monotonic())
            self._display.update(self._task, total=1.0, completed=1.0, share="100%", left="done")
        super().begin(label, starting)
        self._task = self._display.add_task(
            label,
            total=None,
            share="",
            updates=starting or "",
            pace="",
            loss="",
            dropped="",
            left="",
            missing="",
        )
        self._display.refresh()

    def started(self) -> None:
        assert self._task is not None
        self._display.update(self._task, updates="no update yet")
        self._display.refresh()

    def attended(self, alive: int, wanted: int) -> None:
        super().attended(alive, wanted)
        if self.last is not None:  # a run that waits for workers reports no update that would show it
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()


def starting(workers: int, engine: str) -> str:
    """What is shown until the workers are there."""
    some = "a worker" if workers == 1 else f"{workers} workers"
    return f"starting {some} on Ray" if engine == "ray" else f"starting {some}"


def clock_time(seconds: float) -> str:
    """Minutes and seconds, and hours where there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
