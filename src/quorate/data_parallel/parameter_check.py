"""Checks that all processes hold the same model: at the start, on request and after every n-th version."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quorate.data_parallel.plane import Plane
from quorate.data_parallel.process_group import ProcessGroup
from quorate.errors import BadInput, QuorateError, check_at_least
from quorate.learner import digest


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
        #: Called after each version with its number and the seconds it took.
        self.then: Callable[[int, float], None] | None = None
        plane.on_version = self._made

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
        if self.then is not None:
            self.then(version, seconds)

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
