"""What quorate warns of while a command runs, as lines for people."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

_PACKAGE = Path(__file__).parent.parent


@contextmanager
def warnings_are_lines() -> Iterator[None]:
    """Show quorate's own as `warning: …`, without file name and line number. Those of others stay as they are."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=RuntimeWarning, module=r"quorate(\.|$)")
        usual = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, RuntimeWarning) and Path(filename).is_relative_to(_PACKAGE):
                sys.stderr.write(f"warning: {message}\n")
            else:
                usual(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield
