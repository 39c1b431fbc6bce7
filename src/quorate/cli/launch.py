"""`quorate launch`: the processes of a torch.distributed script on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Annotated, NamedTuple

import typer

from quorate.cli.options import OUTPUT, option
from quorate.cli.output import print_json
from quorate.cli.signals import INTERRUPTED, TERMINATED, Stopped, Terminated, signals_wait
from quorate.errors import BadInput
from quorate.machine import cores

PROCESSES = "The processes"
#: After the first failure: time for the other processes to notice it, save, and end by themselves.
GRACE_S = 15.0
#: Time between asking a process to end and killing it.
TERM_S = 5.0
_LONGEST_BACKOFF_S = 30.0
_LOOPBACK = "127.0.0.1"


def launch(
    script: Annotated[list[str], typer.Argument(help="The script and its own arguments.", metavar="SCRIPT")],
    workers: Annotated[int, option(PROCESSES, "How many processes.", "--workers", "-w", min=1, max=1024)],
    restarts: Annotated[
        int, option(PROCESSES, "How often all are started again after one has failed.", min=0, metavar="N")
    ] = 0,
    module: Annotated[bool, option(PROCESSES, "SCRIPT is the name of a module.", "--module", "-m")] = False,
    json: Annotated[
        bool, option(OUTPUT, "Print what became of the processes as one JSON object; their output on stderr.", "--json")
    ] = False,
) -> int:
    """Start a torch.distributed script in several processes of this machine, as torchrun does.

    Options stand before SCRIPT, its own arguments after it. Each line of output has the rank of its process in front.

    When a process fails, the others get 15 seconds to end by themselves. Then all are ended, and started again if
    restarts are left.
    """
    name, *arguments = script
    if not module and not Path(name).is_file():
        raise BadInput(f"there is no script {name!r}; options of quorate stand before the script, its own after it")
    command = [sys.executable, "-u", *(["-m"] if module else []), name, *arguments]
    began, attempt = time.monotonic(), 0
    while True:
        ended = _run_once(command, workers, attempt, sys.stderr.buffer if json else sys.stdout.buffer)
        failed = [one for one in ended if one.status and not one.was_told]
        if not failed or attempt == restarts:
            break
        backoff_s = min(_LONGEST_BACKOFF_S, 0.5 * 2**attempt)
        attempt += 1
        _say(f"{_sentence(failed)}; restart {attempt} of {restarts} in {backoff_s:g} s")
        time.sleep(backoff_s)
    if failed:
        _say(_sentence(failed) + (f", after {restarts} restart{'s' * (restarts > 1)}" if restarts else ""))
    if json:
        statuses = [one.status for one in sorted(ended)]
        print_json({"statuses": statuses, "restarts": attempt, "seconds": round(time.monotonic() - began, 3)})
    return failed[0].exit_status if failed else 0


class Ended(NamedTuple):
    """A process that has ended. status: as subprocess has it, below 0 for a signal."""

    rank: int
    status: int
    was_told: bool = False  # to end, because another one had failed

    @property
    def exit_status(self) -> int:
        return self.status if self.status > 0 else 128 - self.status


def _sentence(failed: Sequence[Ended]) -> str:
    """The failures in the order in which they happened. The first may follow from another one that ended later."""
    texts = [
        f"process {one.rank} was ended by {signal.Signals(-one.status).name}"
        if one.status < 0
        else f"process {one.rank} ended with status {one.status}"
        for one in failed
    ]
    return ", ".join(texts)


def _run_once(command: Sequence[str], workers: int, attempt: int, out: IO[bytes]) -> list[Ended]:
    """Run all processes once; returns them in the order in which they ended."""
    with signals_wait():
        import torch.distributed as dist

        store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    group = _Group(out)
    try:
        for rank in range(workers):
            group.start(rank, command, _environment(rank, workers, store.port, attempt))
        return group.wait()
    except (KeyboardInterrupt, Terminated) as stop:
        number = signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT
        group.stop(number)
        raise Stopped("stopped", TERMINATED if number == signal.SIGTERM else INTERRUPTED) from None
    finally:
        group.kill()


def _environment(rank: int, workers: int, port: int, attempt: int) -> dict[str, str]:
    """The variables that torchrun sets, too."""
    count, number = str(workers), str(rank)
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // workers)))
    return {
        **os.environ,
        "RANK": number,
        "LOCAL_RANK": number,
        "GROUP_RANK": "0",
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, and not in process 0
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


class _Group:
    """The processes of one attempt. Each has a session of its own, so Ctrl-C reaches it through this command only."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ends: SimpleQueue[Ended] = SimpleQueue()
        self._printing = threading.Lock()
        self._readers: list[threading.Thread] = []

    def start(self, rank: int, command: Sequence[str], environment: dict[str, str]) -> None:
        from quorate.engines.local.fork_server import end_with_parent

        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._processes[rank] = process
        assert process.stdout is not None and process.stderr is not None
        prefix = f"[{rank}] ".encode()
        for source, target in ((process.stdout, self._out), (process.stderr, sys.stderr.buffer)):
            reader = threading.Thread(target=self._forward, args=(source, target, prefix), daemon=True)
            reader.start()
            self._readers.append(reader)
        threading.Thread(target=lambda: self._ends.put(Ended(rank, process.wait())), daemon=True).start()

    def wait(self) -> list[Ended]:
        """Wait until all have ended; after the first failure the others must end soon."""
        ended: list[Ended] = []
        limit: float | None = None
        steps = [(signal.SIGTERM, TERM_S), (signal.SIGKILL, TERM_S)]
        while len(ended) < len(self._processes):
            try:
                one = self._ends.get(timeout=None if limit is None else max(0.0, limit - time.monotonic()))
                ended.append(one._replace(was_told=len(steps) < 2))
            except Empty:
                number, then_s = steps.pop(0)
                self._signal(number)
                limit = time.monotonic() + then_s if steps else None
            if limit is None and ended and ended[-1].status and len(steps) == 2:
                limit = time.monotonic() + GRACE_S
        for reader in self._readers:
            reader.join(TERM_S)  # a daemon that a script left behind may hold its pipe open
        return ended

    def stop(self, number: signal.Signals) -> None:
        """Ask all to end as the user asked this command, and wait a while; a second signal ends the wait."""
        with suppress(KeyboardInterrupt, Terminated):
            self._signal(number)
            until = time.monotonic() + GRACE_S
            for process in self._processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
            for reader in self._readers:
                reader.join(0.5)

    def kill(self) -> None:
        """Kill what is left, with what it started itself."""
        self._signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def _forward(self, source: IO[bytes], target: IO[bytes], prefix: bytes) -> None:
        """Print lines with the rank in front; a progress bar's line ends with a carriage return."""
        rest = b""
        while chunk := os.read(source.fileno(), 1 << 16):
            lines = (rest + chunk).splitlines(keepends=True)
            rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
            self._print(target, [prefix + line for line in lines])
        if rest:
            self._print(target, [prefix + rest + b"\n"])
        source.close()

    def _print(self, target: IO[bytes], lines: list[bytes]) -> None:
        with self._printing, suppress(OSError, ValueError):  # nobody reads this command's output any more
            target.write(b"".join(lines))
            target.flush()


def _say(sentence: str) -> None:
    sys.stderr.write(f"quorate launch: {sentence}\n")
    sys.stderr.flush()
