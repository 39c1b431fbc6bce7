"""What workers print, on the driver's standard error: standard output belongs to the command's own result."""

from __future__ import annotations

import os
import sys
from typing import Any

_RAYS_OWN = "ray_print_logs"


def prints_to_stderr() -> None:
    """From now on until the connection ends, lines of workers go to standard error, in colour only in a terminal."""
    try:
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
        from ray._private.worker import print_to_stdstream as _needed  # noqa: F401 - else Ray prints another way
    except ImportError:
        return  # a Ray that has moved it prints as Ray prints
    dispatcher.remove_handler(_RAYS_OWN)
    dispatcher.add_handler(_RAYS_OWN, _print)  # under Ray's name, so that Ray's shutdown removes it


def _print(data: dict[str, Any]) -> None:
    from ray._private import worker
    from ray._private.ray_logging import stderr_deduplicator

    batches = [data] if data.get("pid") == "autoscaler" else stderr_deduplicator.deduplicate(data)
    coloured, before = sys.stderr.isatty(), os.environ.get("RAY_COLOR_PREFIX")
    if not coloured:
        os.environ["RAY_COLOR_PREFIX"] = "0"
    try:
        for batch in batches:
            worker.print_worker_logs(batch, sys.stderr)
    finally:
        if not coloured:
            os.environ.pop("RAY_COLOR_PREFIX", None)
            if before is not None:
                os.environ["RAY_COLOR_PREFIX"] = before
