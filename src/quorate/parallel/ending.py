"""How a script ends: together with the others, also if it does not say so."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import weakref
from contextlib import suppress
from typing import Any

from quorate.errors import QuorateError

#: How long threads may take that only have to notice the end.
_A_MOMENT_S = 0.5


class AtExit:
    """Finishes a model when the interpreter ends, unless the script did; after a failure the others are told.

    A failure is an exception that nobody caught, or `sys.exit` with a status other than 0. What Python says of the
    latter is gone when exit handlers run, so `sys.exit` is listened to for as long as the model trains.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._left: tuple[Any, int] | None = None  # with which status, and at which version
        self._exit, self._listening = sys.exit, self._leave
        sys.exit = self._listening  # type: ignore[assignment]
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        atexit.unregister(self._at_exit)
        if sys.exit is self._listening:
            sys.exit = self._exit

    def _leave(self, status: Any = None) -> None:
        model = self._model()
        if model is not None and status not in (None, 0):
            self._left = status, model.version
        self._exit(status)

    def _at_exit(self) -> None:
        model = self._model()
        if model is None:
            return
        failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # A script may catch its own SystemExit and train on.
        left = None if self._left is None or self._left[1] != model.version else self._left[0]
        if failure is None and left is None:
            with suppress(QuorateError):  # it has been said where it happened
                model.finish()
            return
        model.abort()
        if not model.wait_for_threads(_A_MOMENT_S):
            _end_at_once(130 if isinstance(failure, KeyboardInterrupt) else left if isinstance(left, int) else 1)


def _end_at_once(status: int) -> None:
    """End without Python's own end, which a thread inside an all-reduce does not survive: the process would abort.

    The all-reduce comes back when another process is gone, and then the thread wants an interpreter that is no more.
    """
    atexit._run_exitfuncs()  # those of others, which come after ours
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if status == 130:  # as Python ends after Ctrl-C, so that a shell sees it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)
