"""A process group of our own, like the one the user made.

All-reduces are called from a thread of ours while the user's thread may call collectives on its own group, and two
threads must not share one: calls would meet in a different order in different processes. Ours is not registered with
torch.distributed, so `destroy_process_group()` at the end of a script does not take it away from processes that are
not yet at their end.
"""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quorate.engines.collective.pace import Pace, measure
from quorate.errors import BadInput

_numbers = count()
_MEETING_S, _LONGEST_ALLREDUCE_S = 300.0, 24 * 3600.0
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]


class Processes:
    """The processes that train together, and how they reach each other.

    worker: this process's place among them.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        check_there_is_a_group()
        self.worker, self.workers = dist.get_rank(group), dist.get_world_size(group)
        if self.worker < 0:
            raise BadInput("this process is not in process_group; make DataParallel only in its processes")
        self.backend = _backend_for(group, device)
        members = "-".join(map(str, dist.get_process_group_ranks(group or dist.group.WORLD)))
        # torchrun may hand one store to all lives of a script: what an earlier one left there is not for this one.
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"quorate/{life}/{next(_numbers)}/{members}"
        self.store = _PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        self._device = device
        self._group: Any = None

    def meet(self) -> None:
        """Make the group. A process that gives up while others still connect would be all that they hear of, so
        whatever it can refuse by itself it refuses before."""
        self._group = self._own_group(timedelta(seconds=_MEETING_S))
        # That a process is gone, or silent, the control plane notices: one that evaluates for an hour is neither.
        if hasattr(self._group, "_set_default_timeout"):
            self._group._set_default_timeout(timedelta(seconds=_LONGEST_ALLREDUCE_S))

    def _own_group(self, timeout: timedelta) -> Any:
        store = _PrefixStore("data", self.store)
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, self.worker, self.workers, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, self.worker, self.workers, options)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """Begin to add up a tensor over all processes."""
        return self._group.allreduce(tensors)

    def pace(self) -> Pace:
        """How fast the network is: measured now, the same for all."""
        return measure(lambda tensor: self._group.allreduce([tensor]).wait(), self.workers, self._device)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Everybody gets what one process has."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._group.broadcast([tensor], options).wait()

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """What every process gave, by worker."""
        lengths = torch.zeros(self.workers, dtype=torch.int64)
        lengths[self.worker] = len(own)
        sizes = self._summed(lengths).tolist()
        table = torch.zeros(self.workers, max(*sizes, 1), dtype=torch.uint8)
        table[self.worker, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
        table = self._summed(table)
        return [bytes(table[worker, :size].tolist()) for worker, size in enumerate(sizes)]

    def _summed(self, tensor: Tensor) -> Tensor:
        there = tensor.to(self._device)
        self._group.allreduce([there]).wait()
        return there.cpu()

    def close(self) -> None:
        self._group = None


def check_there_is_a_group() -> None:
    if not dist.is_available() or not dist.is_initialized():
        raise BadInput(
            "there is no process group; call torch.distributed.init_process_group(...) first, "
            "and start the script with torchrun (or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT)"
        )


def _backend_for(group: Any, device: torch.device) -> str:
    """What the user's group uses for tensors on this device."""
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
