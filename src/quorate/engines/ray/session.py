"""Starts a Ray cluster on this machine for one run, forwards the output of workers, and shuts Ray down."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import io
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quorate.engines.ray import security
from quorate.errors import BadInput

#: Size of the object store of a cluster started here; it takes memory only as objects fill it.
OBJECT_STORE_BYTES = 1_000_000_000
_LEAST_STORE_BYTES = 80_000_000  # Ray's minimum
_FOLDER = "quorate-ray-"
_LOCK = "in-use"
_ENDING_S = 10.0
# Ray puts sockets into the folder. The path of a socket has at most 107 bytes, of which Ray's part takes this many.
_ROOM_FOR_SOCKETS = len("/session_2026-01-01_00-00-00_000000_4000000/sockets/plasma_store")
_LONGEST_SOCKET = 107


class Session:
    """Folder and processes of a Ray cluster that this process started."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=_short_folder()))
        self._lock = (self.folder / _LOCK).open("w")  # locked while this process lives: see _remove_abandoned
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def start(self, *, cpus: float, resources: dict[str, float], **settings: Any) -> None:
        """Start Ray and connect to it."""
        import ray

        with security.fresh_token(), loopback_only(True), untouched_signals():
            try:
                ray.init(
                    address="local",
                    num_cpus=max(1, math.ceil(cpus)),
                    resources=resources,
                    object_store_memory=_store_bytes(),
                    include_dashboard=False,
                    _temp_dir=str(self.folder),
                    **settings,
                )
            except (OSError, RuntimeError) as error:
                raise BadInput(
                    f"Ray could not be started on this machine: {first_line(error)}; `ray start --head` shows more, "
                    f"and --address auto uses what it starts"
                ) from error
        _warn_if_not_on_loopback()

    def close(self) -> None:
        """Stop every process and remove every file."""
        try:
            end_connection()
        finally:
            security.forget_token()
            self._lock.close()
            _remove(self.folder)


def end_connection() -> None:
    """Close this process's connection to Ray and stop the processes that `ray.init` started."""
    import ray

    with contextlib.suppress(ImportError, AttributeError):
        from ray._private.ray_logging import stderr_deduplicator

        for batch in stderr_deduplicator.flush():  # Ray holds back repeated lines for a while, to count them
            _write(batch)
    known = inspect.signature(ray.shutdown).parameters
    with untouched_signals():
        if "wait_for_processes" in known:
            ray.shutdown(wait_for_processes=True)
        else:
            from ray._private import worker

            # An older Ray stops its processes without waiting for their end.
            groups = getattr(getattr(worker, "_global_node", None), "all_processes", {}).values()
            started = [info.process for group in groups for info in group]
            ray.shutdown()
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)


@contextlib.contextmanager
def loopback_only(wanted: bool) -> Iterator[None]:
    """Inside, Ray gives this machine's node the address 127.0.0.1 and listens only there.

    `_node_ip_address="127.0.0.1"` does not work: Ray replaces it by the machine's outer address and listens on every
    interface. Ray uses loopback on macOS and Windows; the switch set here makes it do so on Linux (seen in Ray 2.60).
    """
    from ray._private import ray_constants

    before = getattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    if wanted:
        ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def untouched_signals() -> Iterator[None]:
    """Inside, Ray cannot replace our SIGTERM handler, which writes a last checkpoint; Ray's would exit at once.

    Ray's C++ part also installs a handler, below Python's. It prints a stack, calls ours, and aborts the process 3 s
    later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from ray._private import utils

    set_theirs = getattr(utils, "set_sigterm_handler", None)
    before = signal.getsignal(signal.SIGTERM)
    alarms, _ = signal.getitimer(signal.ITIMER_REAL)
    utils.set_sigterm_handler = lambda _: None  # restoring ours later would miss a signal while Ray starts
    try:
        yield
    finally:
        if set_theirs is not None:
            utils.set_sigterm_handler = set_theirs
        current = signal.getsignal(signal.SIGTERM)  # differs from `before` if a signal came meanwhile
        if getattr(current, "__module__", None) is not None and current.__module__.startswith("ray."):
            current = before  # another Ray version sets its handler in another way
        if current is not None:
            signal.signal(signal.SIGTERM, current)  # also replaces the handler of the C++ part
        if not alarms:
            signal.alarm(0)  # cancels the abort, if a signal came meanwhile


def restore_variables(before: dict[str, str]) -> None:
    """Remove the variables that Ray has set since."""
    for name in os.environ.keys() - before.keys():
        if name.startswith("RAY_") or name == "PYTHONBREAKPOINT":
            del os.environ[name]


def first_line(error: BaseException) -> str:
    """First line of an error's text, or its type if there is no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip().rstrip(".")


def _store_bytes() -> int:
    """Size of the object store: small enough for the /dev/shm of a small container."""
    room = OBJECT_STORE_BYTES
    with contextlib.suppress(OSError):
        shared_memory = os.statvfs("/dev/shm")
        room = int(0.8 * shared_memory.f_bavail * shared_memory.f_frsize)
    return max(min(OBJECT_STORE_BYTES, room), _LEAST_STORE_BYTES)


def _warn_if_not_on_loopback() -> None:
    """Warn if an unknown Ray version listens on other addresses; then only the token protects the cluster."""
    import ray

    here = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    if not all(security.is_loopback(address) for address in here):
        warnings.warn(
            f"Ray {ray.__version__} listens on {', '.join(here)} instead of loopback alone; its token still guards it",
            RuntimeWarning,
            stacklevel=2,
        )


def _short_folder() -> str:
    """Parent of the session folder: the usual one for temporary files, unless socket paths in it would be too long."""
    usual = tempfile.gettempdir()
    longest = len(usual) + len(f"/{_FOLDER}12345678") + _ROOM_FOR_SOCKETS
    return usual if longest <= _LONGEST_SOCKET else "/tmp"


def _remove_abandoned() -> None:
    """Remove the folders of killed runs: no process holds their lock any more."""
    for folder in Path(_short_folder()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder. Retries, because processes that are ending may still write to their logs."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        threading.Event().wait(0.05)
    logging.getLogger(__name__).warning("%s could not be removed", folder)


# ---------------------------------------------------------------- lines that workers print


_RAY_HANDLER = "ray_print_logs"  # the name of Ray's own handler
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: Not shown: Ray adds 800 characters of advice for each process that ends, and the run reports its losses itself.
_DIED = "A worker died or was killed while executing a task by an unexpected system error"


def prints_to_stderr() -> None:
    """Send the lines of workers to standard error until the connection ends, in colour only in a terminal."""
    with contextlib.suppress(ImportError, AttributeError):  # another Ray version may not have this dispatcher
        from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

        dispatcher.remove_handler(_RAY_HANDLER)
        dispatcher.add_handler(_RAY_HANDLER, _print)  # under Ray's name, so that Ray's shutdown removes it


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
