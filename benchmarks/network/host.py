"""A host's process: waits with torch imported for runs, and forks a fresh process for each of them.

Importing torch takes longer than a run; forked before torch has computed anything, the new process has no thread,
process group or memory of an earlier run. Speaks lines of JSON: a run to take part in comes in, what it gave goes
out, as {"failed": why} where it gave nothing. The line "stop" ends the run; the end of the input ends the host.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.network.contenders import Run
from benchmarks.network.contenders import run as run_contender
from benchmarks.network.straggling import Straggle
from benchmarks.network.straggling import run as run_straggler

_PR_SET_PDEATHSIG = 1
_LAST_LINES = 4


def main() -> None:
    _warm()
    _say({"ready": os.getpid()})
    for line in iter(_next_line, ""):
        if line.strip() != "stop":
            _say(_run_one(json.loads(line)))


def _warm() -> None:
    """Import what the runs need, so that no fork has to."""
    import quorate

    _ = getattr(quorate, "DataParallel", None)


def _take_part(job: dict[str, Any]) -> dict[str, Any]:
    kinds: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "train": lambda given: run_contender(Run(**given)),
        "straggle": lambda given: run_straggler(Straggle(**given)),
    }
    return kinds[job["kind"]](job["given"])


def _run_one(job: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + job["timeout_s"]
    read, write = os.pipe()
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.close(read)
            _be_the_run(job, write, said.fileno())
        os.close(write)
        answer, why = _answer(read, deadline)
        os.close(read)
        if why is not None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if why is None and answer:
            found: dict[str, Any] = json.loads(answer)
            return found
        said.seek(0)
        lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
        last = " | ".join(lines[-_LAST_LINES:])
        return {"failed": f"{why or f'ended with {os.waitstatus_to_exitcode(status)}'}: {last}"}


def _be_the_run(job: dict[str, Any], write: int, said: int) -> None:
    """The forked side; never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a run never outlives its host
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ.update(job["environment"])
        found = {**_take_part(job), "process_cpu_s": time.process_time()}
        os.write(write, json.dumps(found).encode())
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _answer(read: int, deadline: float) -> tuple[bytes, str | None]:
    """What the run wrote before it ended, and why it is to be killed instead."""
    answer = b""
    while True:
        ready, _, _ = select.select([read, 0], [], [], max(0.0, deadline - time.monotonic()))
        if read in ready:
            piece = os.read(read, 65536)
            if not piece:
                return answer, None
            answer += piece
        elif 0 in ready:  # "stop", or nobody is there any more
            _next_line()
            return answer, "stopped, since it or another host gave up"
        elif not ready:
            return answer, "not done in time"


def _next_line() -> str:
    """A line of the input, read byte by byte so that select() sees whatever has not been read."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return ""
        line += byte
    return line.decode()


def _say(message: dict[str, Any]) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


if __name__ == "__main__":
    main()
