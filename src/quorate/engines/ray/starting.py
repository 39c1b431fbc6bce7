"""A Ray on this machine for one run: on loopback, with a token of its own, and gone without a trace afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import logging
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quorate.engines.ray import security
from quorate.engines.ray.printing import print_what_is_left
from quorate.errors import BadInput

#: What the object store of a Ray of our own may take; memory is only used as objects fill it.
OBJECT_STORE_BYTES = 1_000_000_000
_LEAST_STORE_BYTES = 80_000_000  # Ray refuses less
_FOLDER = "quorate-ray-"
_LOCK = "in-use"
_ENDING_S = 10.0
# Ray puts sockets into the folder (107 bytes is the system's limit for a socket's path), under this much of a name.
_ROOM_FOR_SOCKETS = len("/session_2026-01-01_00-00-00_000000_4000000/sockets/plasma_store")
_LONGEST_SOCKET = 107


class Session:
    """The folder and the processes of a Ray that this process started."""

    def __init__(self) -> None:
        _remove_abandoned()
        self.folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=_short_folder()))
        self._lock = (self.folder / _LOCK).open("w")  # held while this process lives: see _remove_abandoned
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def start(
        self, *, cpus: float, resources: dict[str, float], object_store_bytes: int | None, **settings: Any
    ) -> None:
        """Start Ray and connect to it."""
        import ray

        with security.fresh_token(), loopback_only(True), untouched_signals():
            try:
                ray.init(
                    address="local",
                    num_cpus=max(1, math.ceil(cpus)),
                    resources=resources,
                    object_store_memory=_store_bytes(object_store_bytes),
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
        """End every process and remove every file."""
        try:
            end_connection()
        finally:
            security.forget_token()
            self._lock.close()
            _remove(self.folder)


def end_connection() -> None:
    """Ray's connection of this process ends; processes that `ray.init` started end with it."""
    import ray

    print_what_is_left()
    known = inspect.signature(ray.shutdown).parameters
    with untouched_signals():
        if "wait_for_processes" in known:
            ray.shutdown(wait_for_processes=True)
        else:
            started = _started_processes()
            ray.shutdown()
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_S)


def _started_processes() -> list[subprocess.Popen[bytes]]:
    """Those that an older Ray has started for this process, and ends without waiting for them."""
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    groups = getattr(node, "all_processes", {}).values()
    return [info.process for group in groups for info in group]


@contextlib.contextmanager
def loopback_only(wanted: bool) -> Iterator[None]:
    """Inside, Ray gives this machine's node the address 127.0.0.1, and then listens nowhere else.

    `_node_ip_address="127.0.0.1"` does not do that: Ray puts the machine's outer address in its place, and listens on
    every interface. It takes loopback on macOS and Windows, by the switch that is turned here (seen in Ray 2.60).
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
    """Ray sets a SIGTERM handler of its own that exits at once; ours, which writes a last checkpoint, stays.

    Ray's C++ part sets one too, under Python's: it prints a stack, calls ours, and aborts the process 3 s later.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    from ray._private import utils

    set_theirs = getattr(utils, "set_sigterm_handler", None)
    before = signal.getsignal(signal.SIGTERM)
    alarms, _ = signal.getitimer(signal.ITIMER_REAL)
    utils.set_sigterm_handler = lambda _: None  # putting ours back afterwards would be too late while Ray starts
    try:
        yield
    finally:
        if set_theirs is not None:
            utils.set_sigterm_handler = set_theirs
        current = signal.getsignal(signal.SIGTERM)  # another than before if a signal came meanwhile
        if getattr(current, "__module__", None) is not None and current.__module__.startswith("ray."):
            current = before  # a Ray that sets it in another way
        if current is not None:
            signal.signal(signal.SIGTERM, current)  # also takes it from the C++ part
        if not alarms:
            signal.alarm(0)  # the abort, if a signal came just then


def restore_variables(before: dict[str, str]) -> None:
    """Take away what Ray has put into the environment since."""
    for name in os.environ.keys() - before.keys():
        if name.startswith("RAY_") or name == "PYTHONBREAKPOINT":
            del os.environ[name]


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _store_bytes(wanted: int | None) -> int:
    """The size of the object store: as wanted, else modest, and such that it fits into a small container's /dev/shm."""
    if wanted is not None:
        return max(wanted, _LEAST_STORE_BYTES)
    room = OBJECT_STORE_BYTES
    with contextlib.suppress(OSError):
        shared_memory = os.statvfs("/dev/shm")
        room = int(0.8 * shared_memory.f_bavail * shared_memory.f_frsize)
    return max(min(OBJECT_STORE_BYTES, room), _LEAST_STORE_BYTES)


def _warn_if_not_on_loopback() -> None:
    """Ray's own node may be somewhere else in a release we have not seen; then say so, since the token alone guards."""
    import ray

    here = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    if not all(security.is_loopback(address) for address in here):
        warnings.warn(
            f"Ray {ray.__version__} listens on {', '.join(here)} instead of loopback alone; its token still guards it",
            RuntimeWarning,
            stacklevel=2,
        )


# ---------------------------------------------------------------- the folder


def _short_folder() -> str:
    """Where the folder goes: the usual place for temporary files unless its name is too long for sockets."""
    usual = tempfile.gettempdir()
    if len(usual) + len(f"/{_FOLDER}12345678") + _ROOM_FOR_SOCKETS <= _LONGEST_SOCKET:
        return usual
    return "/tmp"


def _remove_abandoned() -> None:
    """Remove the folders of runs that were killed outright: nobody holds their lock any more."""
    for folder in Path(_short_folder()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove it; processes that are just ending may write a last line of their logs meanwhile."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        threading.Event().wait(0.05)
    logging.getLogger(__name__).warning("%s could not be removed", folder)
