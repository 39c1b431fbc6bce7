"""The process group of `DataParallel`, a probe of how busy the cores are, and checks that all hold the same model.

All-reduces are called from a background thread, while the user's thread may call collectives on its own group. Two
threads must not share one group: different processes could call its collectives in a different order. So `ProcessGroup`
makes a second group with the same members and backend. It is not registered with torch.distributed:
`destroy_process_group()` at the end of one script must not take it away from processes that still train.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from quorate.data_parallel.control.addresses import this_network
from quorate.data_parallel.plane import Plane
from quorate.errors import BadInput, QuorateError, check_at_least
from quorate.learner import digest

_PROBE_BYTES, _PROBES = 1 << 20, 5
_TASKS = Path("/proc/self/task")
_numbers = count()
_MEETING_S, _LONGEST_ALLREDUCE_S = 300.0, 24 * 3600.0
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]


def contention(allreduce: Callable[[Tensor], None], workers: int, device: torch.device) -> float:
    """Share of all-reduce time in which threads waited for a core, 0 to 1: the mean over all processes.

    allreduce: sums a tensor over all workers, and returns when the sum is there.
    """
    probe = torch.zeros(_PROBE_BYTES // 4, device=device)
    allreduce(probe)  # Warm-up: the first call connects and allocates memory.
    began, before = time.monotonic(), _waited_for_a_core_s()
    for _ in range(_PROBES):
        allreduce(probe)
        probe.sum().item()  # On a GPU this waits for the sum.
    share = min(1.0, (_waited_for_a_core_s() - before) / max(time.monotonic() - began, 1e-9))
    mean = torch.tensor([share / workers], dtype=torch.float64, device=device)
    allreduce(mean)
    return float(mean.item())


def _waited_for_a_core_s() -> float:
    """Total seconds in which threads of this process were runnable but not running; 0 if the system does not tell."""
    try:
        return sum(int((thread / "schedstat").read_text().split()[1]) for thread in _TASKS.iterdir()) / 1e9
    except (OSError, IndexError, ValueError):  # This is not Linux, or a thread has just ended.
        return 0.0


class ProcessGroup:
    """The processes that train together, and their collectives. worker: the rank of this process among them."""

    def __init__(self, group: Any, device: torch.device) -> None:
        check_there_is_a_group()
        self.worker, self.workers = dist.get_rank(group), dist.get_world_size(group)
        if self.worker < 0:
            raise BadInput("this process is not in process_group; make DataParallel only in its processes")
        self.backend = _backend_for(group, device)
        members = "-".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
        # torchrun may give the same store to a restarted script, which must not read keys from before the restart.
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"quorate/{life}/{next(_numbers)}/{members}"
        self.store = _PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self._device = device
        self._group: Any = None

    def meet(self) -> None:
        """Connect to the other processes.

        If a process fails while others still connect, they see only a lost connection. So each process checks all it
        can on its own before it calls this.
        """
        store, timeout = _PrefixStore("data", self.store), timedelta(seconds=_MEETING_S)
        if self.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, self.worker, self.workers, timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, self.worker, self.workers, options)
        # The control plane detects lost and silent processes. A process that evaluates for an hour is neither.
        if hasattr(self._group, "_set_default_timeout"):
            self._group._set_default_timeout(timedelta(seconds=_LONGEST_ALLREDUCE_S))

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """Start to sum a tensor over all processes."""
        return self._group.allreduce(tensors)

    def contention(self) -> float:
        """Share of all-reduce time spent waiting for cores rather than for the network; the same in all processes."""
        return contention(lambda tensor: self._group.allreduce([tensor]).wait(), self.workers, self._device)

    def share_cores(self) -> bool:
        """Whether all processes compute on the cores of one host, which then also carry their messages."""
        return self._device.type == "cpu" and len(set(self.gather_bytes(this_network().encode()))) == 1

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite the tensor in all processes with the one of process `source`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._group.broadcast([tensor], options).wait()

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """The bytes of all processes, by worker."""
        lengths = torch.zeros(self.workers, dtype=torch.int64)
        lengths[self.worker] = len(own)
        sizes = self._summed(lengths).tolist()
        table = torch.zeros(self.workers, max(*sizes, 1), dtype=torch.uint8)
        table[self.worker, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
        table = self._summed(table)
        return [bytes(table[worker, :size].tolist()) for worker, size in enumerate(sizes)]

    def _summed(self, tensor: Tensor) -> Tensor:
        on_device = tensor.to(self._device)
        self._group.allreduce([on_device]).wait()
        return on_device.cpu()


def world_size() -> int:
    """Number of processes: torch.distributed's count, or the launcher's before `init_process_group`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_there_is_a_group() -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise BadInput(
            "there is no process group; call torch.distributed.init_process_group(...) first, "
            "and start the script with torchrun (or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT)"
        )


def _backend_for(group: Any, device: torch.device) -> str:
    """The backend that the user's group uses for tensors on this device."""
    config = dist.get_backend_config(group)  # e.g. "cpu:gloo,cuda:nccl"
    by_device = dict(part.split(":") for part in config.split(",") if ":" in part)
    backend = by_device.get(device.type, dist.get_backend(group))
    if backend == "nccl" and device.type == "cpu":
        raise BadInput(
            "the process group uses NCCL, which moves tensors between GPUs only, but the model is on the CPU; "
            'move the model to this process\'s GPU, or init_process_group("gloo")'
        )
    if backend not in ("gloo", "nccl"):
        raise BadInput(f"the process group uses {backend}; DataParallel works on gloo and NCCL")
    return backend


def check_same_model(
    processes: ProcessGroup, named: Iterable[tuple[str, Tensor]], optimizer: Optimizer, policy: str
) -> None:
    """Refuse models, optimizers or policies that differ between processes; all processes raise the same error."""
    mine: list[Any] = [
        [name, f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"] for name, tensor in named
    ]
    mine.append(["the policy", policy])
    groups = [len(group["params"]) for group in optimizer.param_groups]
    mine.append(["the optimizer", f"{type(optimizer).__name__} with {groups} parameters in its groups"])
    own = json.dumps(mine).encode()
    if len(set(processes.gather_bytes(hashlib.sha256(own).digest()))) == 1:
        return
    descriptions = [json.loads(text) for text in processes.gather_bytes(own)]
    for worker, other in enumerate(descriptions):
        if other != descriptions[0]:
            raise BadInput(_difference(worker, descriptions[0], other))


def _difference(worker: int, first: list[Any], other: list[Any]) -> str:
    remedy = "build the same model, optimizer and policy in every process"
    surplus = len(first) - len(other)  # The last two entries of each list are the policy and the optimizer.
    if surplus and all(a[0] == b[0] for a, b in zip(first[:-2], other[:-2], strict=False)):
        name = first[len(other) - 2][0] if surplus > 0 else other[len(first) - 2][0]
        with_it, without = (0, worker) if surplus > 0 else (worker, 0)
        return f"{name} is in process {with_it} but not in process {without}; {remedy}"
    for (name, kind), (its_name, its_kind) in zip(first, other, strict=False):
        if name != its_name:
            return f"process {worker} has {its_name} where process 0 has {name}; {remedy}"
        if kind != its_kind:
            return f"{name} is {kind} in process 0 but {its_kind} in process {worker}; {remedy}"
    raise AssertionError("nothing differs")


def check_same_values(processes: ProcessGroup, named: Iterable[tuple[str, Tensor]], version: int) -> str:
    """Compare every tensor between all processes; returns their common digest."""
    parts = [(name, hashlib.sha256(_content(tensor)).hexdigest()) for name, tensor in named]
    own = hashlib.sha256("".join(digest for _, digest in parts).encode()).hexdigest()
    mine = {"version": version, "digest": own}
    states = [json.loads(text) for text in processes.gather_bytes(json.dumps(mine).encode())]
    if all(one == states[0] for one in states):
        return own
    tables = [json.loads(text) for text in processes.gather_bytes(json.dumps([one for _, one in parts]).encode())]
    for worker, (one, table) in enumerate(zip(states, tables, strict=True)):
        if one["version"] != states[0]["version"]:
            raise QuorateError(
                f"process {worker} is at version {one['version']}, but process 0 at {states[0]['version']}: "
                f"compare when all have made the same updates"
            )
        for (name, _), theirs, first in zip(parts, table, tables[0], strict=True):
            if theirs != first:
                raise QuorateError(f"{name} differs between process 0 and process {worker} at version {one['version']}")
    return own


def _content(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


class Checker:
    """Sends a digest of every `every`-th version to the other processes, and compares their digests with its own.

    The data plane's updating thread calls it after each version, when the parameters are exactly that version.
    """

    def __init__(
        self, every: int | None, named: Sequence[tuple[str, Tensor]], plane: Plane, send: Callable[..., None]
    ) -> None:
        self._every = None if every is None else check_at_least("check_every", every, 1)
        self._names = {parameter: name for name, parameter in named}
        self._plane, self._send = plane, send
        self._lock = threading.Lock()
        self._own: dict[int, str] = {}
        self._theirs: dict[int, list[tuple[int, str]]] = {}
        plane.on_version.append(self._made)

    def _made(self, version: int, seconds: float) -> None:
        if self._every is not None and version % self._every == 0:
            own = digest({self._names[one]: tensor.cpu() for one, tensor in self._plane.newest().items()})
            with self._lock:
                self._own[version] = own
                self._own.pop(version - 16 * self._every, None)
                theirs = self._theirs.pop(version, [])
            self._send("digest", version=version, digest=own)
            for worker, other in theirs:
                self._compare(version, worker, own, other)

    def heard(self, message: dict[str, Any]) -> None:
        """Compare the digest of another process, or keep it until this process has made that version."""
        version, worker, other = message["version"], message["worker"], message["digest"]
        with self._lock:
            own = self._own.get(version)
            if own is None:
                self._theirs.setdefault(version, []).append((worker, other))
        if own is not None:
            self._compare(version, worker, own, other)

    def _compare(self, version: int, worker: int, own: str, other: str) -> None:
        if own != other:
            self._plane.fail(
                QuorateError(
                    f"the parameters of process {worker} differ from those of process {self._plane.worker} at version "
                    f"{version}: something besides optimizer.step() changes them, or the optimizers differ"
                )
            )
