"""Resumes a restarted script from the newest checkpoint that any of its processes can see.

Each process looks into its own folder, on a shared disk or on its machine's own. The process with the newest version
reads the checkpoint and sends its bytes to all. So worker 0 may run on another machine than before, and the number of
processes may differ. Only numbers and the checkpoint's bytes are sent; nothing is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from quorate.checkpoint import FILES, CheckpointFolder, Damaged, Loaded, state_in
from quorate.checkpoint_schedule import warn
from quorate.data_parallel.process_group import ProcessGroup
from quorate.data_parallel.saving import Saver
from quorate.errors import BadInput

T = TypeVar("T")
#: Bytes sent at a time, so that a large model needs no second copy on a GPU.
CHUNK_BYTES = 1 << 26
_NONE = -1  # the version of a process without a checkpoint


class StartExchange:
    """Exchanges whole numbers, bytes and errors between the processes of a group when they start.

    device: the device of the group's tensors; NCCL takes only tensors on a GPU.
    """

    def __init__(self, group: ProcessGroup, device: torch.device | str = "cpu") -> None:
        self.group, self._device = group, torch.device(device)
        self.worker = group.worker

    def numbers(self, mine: int) -> list[int]:
        """The number of each process."""
        return [int(one) for one in self.group.gather_bytes(str(mine).encode())]

    def sent(self, content: bytes | None, source: int) -> bytes:
        """Send one process's bytes to all of them."""
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
        """Run `work` in all processes. If one raises BadInput, all raise it, so that none waits forever."""
        try:
            result = work()
        except BadInput as error:
            self.group.gather_bytes(str(error).encode())
            raise
        for worker, error_text in enumerate(self.group.gather_bytes(b"")):
            if error_text:
                raise BadInput(f"process {worker}: {error_text.decode()}")
        return result


@dataclass(frozen=True)
class Resumed:
    """The version from which a script resumes, and the `extra` of its checkpoint."""

    version: int
    extra: dict[str, Any]


def saving_if_asked(
    group: ProcessGroup,
    device: torch.device,
    checkpoint: str | Path | None,
    make: Callable[[], Saver],
    also: Mapping[str, Any] | None = None,
) -> tuple[Saver | None, Resumed | None]:
    """`start_saving` if the script gave a folder for checkpoints, which it must do in every process."""
    exchange = StartExchange(group, device)
    asked = exchange.numbers(int(checkpoint is not None))
    if any(exchange.numbers(int(also is not None))) and not any(asked):
        raise BadInput(
            "also= names what to save, but there is no checkpoint= to save it in; give it, or leave out both"
        )
    if len(set(asked)) > 1:
        raise BadInput(
            f"process {asked.index(1)} has checkpoint=, but process {asked.index(0)} has not; give it in every process"
        )
    if checkpoint is None:
        return None, None
    _refuse_a_shared_store(os.environ)
    return start_saving(make, exchange)


def _refuse_a_shared_store(environment: Mapping[str, str]) -> None:
    """Refuse torchrun's store that restarts share: a restarted process would connect to the addresses of dead ones.

    It would hang in `init_process_group`, before Quorate runs: pytorch/pytorch#135712, still so in torch 2.13.
    """
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and restarts != "0":
        raise BadInput(
            "a restart by torchrun would hang, since restarted processes find the addresses of the dead ones; start it "
            "as TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone … (on several machines with "
            "--rdzv-backend=c10d), or with --max-restarts 0"
        )


def start_saving(make: Callable[[], Saver], exchange: StartExchange) -> tuple[Saver, Resumed | None]:
    """Construct the saver of each process, and restore all of them from the newest checkpoint, if there is one."""
    saver = exchange.all_or_none(make)
    loaded = newest_of_all(saver.folder, exchange)
    if loaded is None:
        return saver, None
    return saver, Resumed(loaded.version, exchange.all_or_none(lambda: saver.restore(loaded)))


def newest_of_all(folder: CheckpointFolder, exchange: StartExchange) -> Loaded | None:
    """The newest undamaged checkpoint that any process sees, in all of them; None if no process sees one."""
    versions = exchange.all_or_none(lambda: _versions(folder))
    while True:
        newest_by_worker = exchange.numbers(versions[-1] if versions else _NONE)
        newest = max(newest_by_worker)
        if newest == _NONE:
            return None
        source = newest_by_worker.index(newest)
        is_mine = exchange.worker == source
        content = exchange.all_or_none(lambda: _read(folder, newest) if is_mine else None)  # noqa: B023
        if exchange.numbers(int(content is not None))[source]:
            files = {name: exchange.sent(content[name] if content else None, source) for name in FILES}
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
    """The files of a checkpoint; None, with a warning, if it is damaged."""
    try:
        content = folder.content(version)
        state_in(content)
    except Damaged as fault:
        warn(f"checkpoint {version:08d} in {str(folder.folder)!r} is damaged ({fault}); an earlier one will be used")
        return None
    return content
