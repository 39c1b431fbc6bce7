"""How a script ends: together with the others, also if it does not say so."""

from __future__ import annotations

import atexit
import sys
import weakref
from contextlib import suppress
from typing import Any

from quorate.errors import QuorateError


class AtExit:
    """Finishes a model when the interpreter ends, unless the script did; after an exception the others are told."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        model = self._model()
        if model is None:
            return
        if getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None:
            model.abort()
            return
        with suppress(QuorateError):  # it has been said where it happened
            model.finish()
