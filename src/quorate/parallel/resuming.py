"""Where a restarted script goes on: from the newest checkpoint that any of its processes can see.

Each process looks into its own folder, which may be a disk they share or one that each machine has for itself. The one
with the newest version reads it and sends its bytes to all. So it does not matter where worker 0 is this time, nor how
many processes there are. What is sent are numbers and the checkpoint's own bytes, nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from quorate.checkpoint import FILES, CheckpointFolder, Damaged, Loaded, state_in
from quorate.checkpointing import warn
from quorate.errors import BadInput
from quorate.parallel.saving import Saver

T = TypeVar("T")
#: Sent at a time, so that a large model needs no second copy of itself on a GPU.
CHUNK_BYTES = 1 << 26
_NONE = -1  # as a version: no checkpoint


class Group(Protocol):
    """The processes that start together, and what they can do to tell each other."""

    worker: int

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """What every process gave, by worker."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Everybody gets what one process has."""


class Together:
    """What the processes of a group tell each other when they start: whole numbers, bytes, and troubles.

    device: where the group's tensors must be; a group of NCCL takes only those of a GPU.
    """

    def __init__(self, group: Group, device: torch.device | str = "cpu") -> None:
        self.group, self._device = group, torch.device(device)
        self.worker = group.worker

    def numbers(self, mine: int) -> list[int]:
        """The number of each process."""
        return [int(one) for one in self.group.gather_bytes(str(mine).encode())]

    def sent(self, content: bytes | None, source: int) -> bytes:
        """The bytes that one process has, on all of them."""
        received = bytearray(self.numbers(len(content or b""))[source])
        if content is not None:
            received[:] = content
        for start in range(0, len(received), CHUNK_BYTES):
            count = min(CHUNK_BYTES, len(received) - start)
            chunk = torch.frombuffer(received, dtype=torch.uint8, offset=start, count=count)
            moved = chunk.to(self._device)
            self.group.broadcast(moved, source)
            chunk.copy_(moved)
        return bytes(received)

    def all_or_none(self, work: Callable[[], T]) -> T:
        """Do something that may be refused on one process only: it is then refused on all, and nobody waits in vain."""
        done: list[T] = []
        trouble: BadInput | None = None
        try:
            done.append(work())
        except BadInput as refusal:
            trouble = refusal
        sentences = self.group.gather_bytes(str(trouble or "").encode())
        if trouble is not None:
            raise trouble
        for worker, sentence in enumerate(sentences):
            if sentence:
                raise BadInput(f"process {worker}: {sentence.decode()}")
        return done[0]


@dataclass(frozen=True)
class Resumed:
    """Where a script goes on: the version, and what the caller had added to its checkpoint."""

    version: int
    extra: dict[str, Any]


def saving_if_asked(
    group: Group,
    device: torch.device,
    checkpoint: str | Path | None,
    make: Callable[[], Saver],
    also: Mapping[str, Any] | None = None,
) -> tuple[Saver | None, Resumed | None]:
    """`start_saving`, where the script gave a folder for checkpoints; it must have done so in every process."""
    together = Together(group, device)
    asked = together.numbers(int(checkpoint is not None))
    if any(together.numbers(int(also is not None))) and not any(asked):
        raise BadInput(
            "also= names what to save, but there is no checkpoint= to save it in; give it, or leave out both"
        )
    if len(set(asked)) > 1:
        raise BadInput(
            f"process {asked.index(1)} has checkpoint=, but process {asked.index(0)} has not; give it in every process"
        )
    if checkpoint is None:
        return None, None
    if together.worker == 0:
        _warn_of_old_addresses(os.environ)
    return start_saving(make, together)


def _warn_of_old_addresses(environment: Mapping[str, str]) -> None:
    """torchrun hands one store to all lives of a script, and a new life may find the addresses of the old one in it.

    See pytorch/pytorch#135712; torch 2.13 still does.
    """
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and restarts != "0":
        warn(
            "after a restart torchrun may send processes to addresses of those that died; start it with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 set, and with --standalone or --rdzv-backend=c10d"
        )


def start_saving(make: Callable[[], Saver], together: Together) -> tuple[Saver, Resumed | None]:
    """Make the saver of each process, and bring all of them to the newest checkpoint, if there is one."""
    saver = together.all_or_none(make)
    loaded = newest_of_all(saver.folder, together)
    if loaded is None:
        return saver, None
    return saver, Resumed(loaded.version, together.all_or_none(lambda: saver.restore(loaded)))


def newest_of_all(folder: CheckpointFolder, together: Together) -> Loaded | None:
    """The newest sound checkpoint that any process sees, on all of them; None where nobody sees one."""
    versions = together.all_or_none(lambda: _versions(folder))
    while True:
        everybodys = together.numbers(versions[-1] if versions else _NONE)
        newest = max(everybodys)
        if newest == _NONE:
            return None
        source = everybodys.index(newest)
        is_mine = together.worker == source
        content = together.all_or_none(lambda: _read(folder, newest) if is_mine else None)  # noqa: B023
        if together.numbers(int(content is not None))[source]:
            files = {name: together.sent(content[name] if content else None, source) for name in FILES}
            return Loaded(newest, state_in(files), ())
        if is_mine:
            versions.pop()


def _versions(folder: CheckpointFolder) -> list[int]:
    try:
        return folder.versions()
    except OSError as fault:
        raise BadInput(
            f"the folder {str(folder.folder)!r} cannot be read ({fault.strerror or fault}); "
            "give checkpoint= another one"
        ) from fault


def _read(folder: CheckpointFolder, version: int) -> dict[str, bytes] | None:
    """The files of a checkpoint, if it is sound; else whoever runs this is told."""
    try:
        content = folder.content(version)
        state_in(content)
    except Damaged as fault:
        warn(f"checkpoint {version:08d} in {str(folder.folder)!r} is damaged ({fault}); an earlier one will be used")
        return None
    return content
