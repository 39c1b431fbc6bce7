"""How far a run is, on stderr: a bar on a terminal, a line now and then elsewhere.

A run reports after every update, at 100,000 a second and more, so the first thing done is to look at the clock.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.progress import TaskID

    from quorate.running import Progress

REDRAW_S, LINE_S = 0.1, 5.0


class Reporter(Protocol):
    """Told of every update of one run after the other."""

    last: Progress | None

    def begin(self, label: str) -> None: ...

    def __call__(self, progress: Progress) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


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
        self._label = ""
        self._began_at = self._next_at = 0.0

    def begin(self, label: str) -> None:
        self._label = label
        self.last = None
        self._began_at = time.monotonic()
        self._next_at = self._began_at + self.every_s

    def __call__(self, progress: Progress) -> None:
        self.last = progress
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + self.every_s
            self._show(progress, now - self._began_at)

    def _show(self, progress: Progress, elapsed_s: float) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Lines(Silence):
    """A line every five seconds."""

    def _show(self, progress: Progress, elapsed_s: float) -> None:
        share = "" if progress.share is None else f"{progress.share:.0%}, "
        left = _left(progress.share, elapsed_s)
        sys.stderr.write(
            f"{self._label}: {share}{progress.updates:,} updates ({progress.updates / elapsed_s:,.0f}/s), "
            f"{progress.seconds:.4g} s virtual{'' if progress.loss is None else f', loss {progress.loss:.3g}'}, "
            f"dropped {progress.drop_rate:.0%}{f', {left} left' if left else ''}\n"
        )
        sys.stderr.flush()


class Bar(Silence):
    """A bar per run, redrawn ten times a second; it goes when the command is done."""

    every_s = REDRAW_S

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Display
        from rich.table import Column

        def text(template: str, justify: str = "right") -> TextColumn:
            return TextColumn(
                template,
                style="default",
                justify="left" if justify == "left" else "right",
                table_column=Column(no_wrap=True),
            )

        self._task: TaskID | None = None
        self._display = Display(
            text("{task.description}", "left"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
            *(text(f"{{task.fields[{name}]}}") for name in ("share", "updates", "rate", "loss", "dropped", "left")),
            console=Console(stderr=True),
            auto_refresh=False,  # no thread: the run itself says when there is something new
            transient=True,
            expand=True,
        )

    def begin(self, label: str) -> None:
        if self._task is not None:
            if self.last is not None:
                self._show(self.last, time.monotonic() - self._began_at)
            self._display.update(self._task, total=1.0, completed=1.0, share="100%", left="done")
        super().begin(label)
        self._task = self._display.add_task(
            label, total=None, share="", updates="", rate="", loss="", dropped="", left=""
        )
        self._display.refresh()

    def _show(self, progress: Progress, elapsed_s: float) -> None:
        assert self._task is not None
        share = progress.share
        self._display.update(
            self._task,
            total=None if share is None else 1.0,
            completed=share or 0.0,
            share="" if share is None else f"{share:.0%}",
            updates=f"{progress.updates:,} updates",
            rate=f"{progress.updates / elapsed_s:,.0f}/s",
            loss="" if progress.loss is None else f"loss {progress.loss:.3f}",
            dropped=f"drop {progress.drop_rate:.0%}",
            left=_left(share, elapsed_s),
        )
        self._display.refresh()

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()


def _left(share: float | None, elapsed_s: float) -> str:
    """How long it will take at this pace; nothing where that is unknown."""
    if not share or elapsed_s < 1:
        return ""
    seconds = round(elapsed_s * (1 - share) / share)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
