"""Ends a script together with the other processes, even if it does not call `finish()`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

from quorate.errors import QuorateError

#: Time for threads to notice the end.
_NOTICE_S = 0.5


class AtExit:
    """Finishes a model when the interpreter ends, unless the script did; after a failure it aborts the run.

    A failure is an uncaught exception, or `sys.exit` with a status other than 0. Exit handlers cannot see that status,
    so `sys.exit` is replaced while the model trains.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._kept: Any = None  # keeps a dropped model alive until the script ends
        self._left: tuple[Any, int] | None = None  # exit status, and the model's version at that time
        self._exit, self._replacement = sys.exit, self._leave
        sys.exit = self._replacement  # type: ignore[assignment]
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        atexit.unregister(self._at_exit)
        if sys.exit is self._replacement:
            sys.exit = self._exit

    def _leave(self, status: Any = None) -> None:
        model = self._model()
        if model is not None and status not in (None, 0):
            self._left = status, model.version
        self._exit(status)

    def dropped(self, model: Any) -> None:
        """The script has dropped an unfinished model: finish it with the other processes, as at the script's end."""
        if self._left is not None:
            self._kept = model  # the script is about to end
        elif threading.current_thread().name.startswith("quorate-"):  # the garbage collector ran in it
            threading.Thread(target=_end, args=(model,), name="quorate-ending").start()
        else:
            _end(model)

    def _at_exit(self) -> None:
        model = self._model()
        if model is None:
            return
        failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # A script may catch its own SystemExit and continue training.
        left = None if self._left is None or self._left[1] != model.version else self._left[0]
        if failure is None and left is None:
            _end(model)
            return
        model.abort()
        if not model.wait_for_threads(_NOTICE_S):
            _end_at_once(130 if isinstance(failure, KeyboardInterrupt) else left if isinstance(left, int) else 1)


def _end(model: Any) -> None:
    with suppress(QuorateError):  # already reported where it happened
        model.finish()


def _end_at_once(status: int) -> None:
    """Exit without Python's finalization, in which a thread inside an all-reduce would abort the process.

    The all-reduce returns when another process is gone, and its thread then needs an interpreter that no longer exists.
    """
    atexit._run_exitfuncs()  # the remaining exit handlers
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if status == 130:  # exit like Python after Ctrl-C, so that a shell sees it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)
