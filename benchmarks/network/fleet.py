"""One process on each host, launched with torchrun's variables, pinned, and asked for one run after another."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.network.hosts import INTERFACE, Hosts

_ROOT = Path(__file__).parents[2]
_FIRST_PORT = 29400  # every host has a network of its own, so no port is taken; a new one a run, since old ones linger
_GRACE_S = 15.0  # a host answers within that after it has been told to stop
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
}


class RunFailedError(Exception):
    """A run gave no figures; the text says which host said what."""


@dataclass(frozen=True)
class Timed:
    """What a run took on all hosts together."""

    seconds: float  # from the barrier to the last host's end
    iterations: int
    cpu_s: float  # of all hosts
    noise_cores: float  # that other programs took meanwhile, the hypervisor included
    hosts: list[dict[str, Any]]  # what each said

    @property
    def per_s(self) -> float:
        return self.iterations / self.seconds

    @property
    def iteration_s(self) -> float:
        return self.seconds / self.iterations

    def as_json(self) -> dict[str, Any]:
        losses = [host["loss"] for host in self.hosts if "loss" in host]
        return {
            "iterations_per_s": self.per_s,
            "iteration_s": self.iteration_s,
            "cpu_ms_per_iteration": 1e3 * self.cpu_s / self.iterations,
            "noise_cores": self.noise_cores,
            "finish_s": max(host.get("finish_s", 0.0) for host in self.hosts),
            "losses": losses,
            "weights": [host["weights"] for host in self.hosts if "weights" in host],
        }


class Fleet:
    """The hosts' processes, for the length of a `with`."""

    def __init__(self, hosts: Hosts, pin: bool = True) -> None:
        self._hosts = hosts
        self._pin = pin
        self._port = _FIRST_PORT
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Fleet:
        try:
            for host in range(self._hosts.count):
                self._processes.append(self._start(host))
            self._answers(120.0)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def pinned_to(self, host: int) -> list[int]:
        """Cores in turn, so that each serves as many hosts as any other; all contenders have the same."""
        cores = sorted(os.sched_getaffinity(0))
        return [cores[host % len(cores)]] if self._pin else cores

    def run(self, kind: str, given: Any, timeout_s: float) -> Timed:
        """One run on all hosts to its end; raises RunFailedError if it has none, and every process of it is gone."""
        self._port += 1
        before = _machine_cpu_s()
        begin = time.monotonic()
        for host, process in enumerate(self._processes):
            job = {
                "kind": kind,
                "given": asdict(given),
                "timeout_s": timeout_s,
                "environment": self._environment(host),
            }
            _write(process, json.dumps(job))
        answers = self._answers(timeout_s + _GRACE_S)
        busy_s, wall_s = _machine_cpu_s() - before, time.monotonic() - begin
        failed = [f"host {host}: {answer['failed']}" for host, answer in enumerate(answers) if "failed" in answer]
        if failed:
            first = next((text for text in failed if "stopped, since" not in text), failed[0])
            raise RunFailedError(first)
        # Training ends when all hosts have ended; a version is there when the first host has it.
        which = max if kind == "train" else min
        seconds = which(answer["end_s"] for answer in answers) - which(answer["start_s"] for answer in answers)
        ours_s = sum(answer["process_cpu_s"] for answer in answers)
        return Timed(
            seconds=seconds,
            iterations=answers[0].get("iterations", getattr(given, "iterations", 0)),
            cpu_s=sum(answer["cpu_s"] for answer in answers),
            noise_cores=max(0.0, busy_s - ours_s) / wall_s,
            hosts=answers,
        )

    def _environment(self, host: int) -> dict[str, str]:
        return {
            "RANK": str(host),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self._hosts.count),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self._hosts.address(0),
            "MASTER_PORT": str(self._port),
        }

    def _start(self, host: int) -> subprocess.Popen[bytes]:
        cores = ",".join(map(str, self.pinned_to(host)))
        return subprocess.Popen(
            self._hosts.inside(host, ["taskset", "-c", cores, sys.executable, "-m", "benchmarks.network.host"]),
            cwd=_ROOT,
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the one that asks
        )

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        """One line from every host. Where one has failed, or none comes in time, the others are told to stop."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        is_stopped = False
        with selectors.DefaultSelector() as waiting:
            for host, process in enumerate(self._processes):
                waiting.register(_pipe(process.stdout), selectors.EVENT_READ, host)
            while len(answers) < len(self._processes):
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    line = _pipe(self._processes[key.data].stdout).readline()
                    answers[key.data] = json.loads(line) if line else {"failed": "the host's process ended"}
                    waiting.unregister(key.fileobj)
                if not ready and is_stopped:
                    raise RunFailedError(f"{len(self._processes) - len(answers)} hosts do not answer")
                if not is_stopped and (not ready or any("failed" in answer for answer in answers.values())):
                    is_stopped, deadline = True, time.monotonic() + _GRACE_S
                    for host, process in enumerate(self._processes):
                        if host not in answers:
                            _write(process, "stop")
        return [answers[host] for host in range(len(self._processes))]

    def _end(self) -> None:
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and did not read what was written last
                _pipe(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _pipe(process.stdout).close()
        self._processes = []


def wait_for_quiet(most_s: float, cores: float) -> None:
    """Until other programs have left the machine alone for half a second, or `most_s` are over."""
    deadline = time.monotonic() + most_s
    while time.monotonic() < deadline:
        before, began = _machine_cpu_s(), time.monotonic()
        time.sleep(0.5)
        if (_machine_cpu_s() - before) / (time.monotonic() - began) <= cores:
            return


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _write(process: subprocess.Popen[bytes], line: str) -> None:
    try:
        _pipe(process.stdin).write((line + "\n").encode())
        _pipe(process.stdin).flush()
    except BrokenPipeError:  # said when its answer is read
        pass


def _machine_cpu_s() -> float:
    """CPU seconds of all programs, with what the hypervisor gave to others."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        int(ticks) / _TICKS_PER_S for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return user + nice + system + irq + softirq + steal
