"""What workers print, on the driver's standard error: standard output belongs to the command's own result."""

from __future__ import annotations

import io
import re
import sys
from contextlib import suppress
from typing import Any

_RAYS_OWN = "ray_print_logs"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: Ray follows it with 800 characters of advice for each process that ends; the run says itself what it has lost.
_DIED = "A worker died or was killed while executing a task by an unexpected system error"


def prints_to_stderr() -> None:
    """From now on until the connection ends, lines of workers go to standard error, in colour only in a terminal."""
    with suppress(ImportError, AttributeError):  # a Ray that has moved it prints as it pleases
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        dispatcher.remove_handler(_RAYS_OWN)
        dispatcher.add_handler(_RAYS_OWN, _print)  # under Ray's name, so that Ray's shutdown removes it


def print_what_is_left() -> None:
    """Lines that many workers printed alike are held back for a while, to be counted; now they are shown."""
    with suppress(ImportError, AttributeError):
        from ray._private.ray_logging import stderr_deduplicator

        for batch in stderr_deduplicator.flush():
            _write(batch)


def _print(data: dict[str, Any]) -> None:
    from ray._private.ray_logging import stderr_deduplicator

    if data.get("pid") == "raylet":
        data = {**data, "lines": [line for line in data["lines"] if not line.startswith(_DIED)]}
    for batch in [data] if data.get("pid") == "autoscaler" else stderr_deduplicator.deduplicate(data):
        _write(batch)


def _write(batch: dict[str, Any]) -> None:
    from ray._private.worker import print_worker_logs

    text = io.StringIO()
    print_worker_logs(batch, text)
    sys.stderr.write(text.getvalue() if sys.stderr.isatty() else _COLOUR.sub("", text.getvalue()))
    sys.stderr.flush()
