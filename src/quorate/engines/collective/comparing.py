"""Whether all processes hold the same model, and in what they first differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from quorate.engines.collective.groups import Processes
from quorate.errors import BadInput, QuorateError


def check_same_model(
    processes: Processes, named: Iterable[tuple[str, Tensor]], optimizer: Optimizer, policy: str
) -> None:
    """Refuse models, optimizers or policies that differ between processes; everybody gets the same error."""
    mine: list[Any] = [[name, f"{_type(tensor)}{list(tensor.shape)}"] for name, tensor in named]
    mine.append(["the policy", policy])
    groups = [len(group["params"]) for group in optimizer.param_groups]
    mine.append(["the optimizer", f"{type(optimizer).__name__} with {groups} parameters in its groups"])
    own = json.dumps(mine).encode()
    digests = processes.gather_bytes(hashlib.sha256(own).digest())
    if len(set(digests)) == 1:
        return
    first = json.loads(processes.gather_bytes(own)[0])
    for worker, text in enumerate(processes.gather_bytes(own)):
        other = json.loads(text)
        if other != first:
            raise BadInput(_difference(worker, first, other))


def _difference(worker: int, first: list[Any], other: list[Any]) -> str:
    remedy = "build the same model, optimizer and policy in every process"
    beyond = len(first) - len(other)  # the last two of each are the policy and the optimizer
    if beyond and all(a[0] == b[0] for a, b in zip(first[:-2], other[:-2], strict=False)):
        name = first[len(other) - 2][0] if beyond > 0 else other[len(first) - 2][0]
        with_it, without = (0, worker) if beyond > 0 else (worker, 0)
        return f"{name} is in process {with_it} but not in process {without}; {remedy}"
    for (name, kind), (its_name, its_kind) in zip(first, other, strict=False):
        if name != its_name:
            return f"process {worker} has {its_name} where process 0 has {name}; {remedy}"
        if kind != its_kind:
            return f"{name} is {kind} in process 0 but {its_kind} in process {worker}; {remedy}"
    raise AssertionError("nothing differs")


def check_same_values(processes: Processes, named: Iterable[tuple[str, Tensor]], version: int) -> str:
    """Compare every tensor between all processes; gives the digest that all have."""
    parts = [(name, hashlib.sha256(_content(tensor)).hexdigest()) for name, tensor in named]
    own = hashlib.sha256("".join(digest for _, digest in parts).encode()).hexdigest()
    mine = {"version": version, "digest": own}
    everybody = [json.loads(text) for text in processes.gather_bytes(json.dumps(mine).encode())]
    if all(one == everybody[0] for one in everybody):
        return own
    tables = [json.loads(text) for text in processes.gather_bytes(json.dumps([one for _, one in parts]).encode())]
    for worker, (one, table) in enumerate(zip(everybody, tables, strict=True)):
        if one["version"] != everybody[0]["version"]:
            raise QuorateError(
                f"process {worker} is at version {one['version']}, but process 0 at {everybody[0]['version']}: "
                f"compare when all have made the same updates"
            )
        for (name, _), theirs, first in zip(parts, table, tables[0], strict=True):
            if theirs != first:
                raise QuorateError(f"{name} differs between process 0 and process {worker} at version {one['version']}")
    return own


def _content(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
