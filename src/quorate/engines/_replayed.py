"""Asynchronous arithmetic on a GPU: a gradient is one replay of a recording, and nobody waits for the device."""

from __future__ import annotations

import torch

from quorate.engines._bench import Bench
from quorate.engines._recorded import Recorded
from quorate.engines._slots import Computed, Slot, Slotted
from quorate.events import Ticket
from quorate.flat import Flat
from quorate.policies import Policy


class _Slot(Slot):
    """numbers: loss and norm, in pinned memory, once `done`."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.numbers = torch.zeros(2, dtype=torch.float64, pin_memory=True)
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]


class Replayed(Slotted[_Slot]):
    """As `Kept`, but for batches of the usual size several times as fast.

    Loss and norm go to the CPU as soon as they are computed, and are looked at when the ticket arrives: by then they
    are usually there, so neither the device nor the CPU waits.
    """

    def __init__(self, bench: Bench, policy: Policy, recording: Recorded) -> None:
        super().__init__(bench, policy, recording.samples)
        self._recording = recording
        self._versions_read: dict[int, Flat] = {}  # by ticket, where delay compensation wants them
        self._newest = self.learner.flat.copy() if self._history else None

    def _new_slot(self) -> _Slot:
        return _Slot(self.bench)

    def _begin(self, ticket: Ticket, slot: _Slot) -> None:
        recording = self._recording
        if ticket.version == self.learner.version:
            recording.start.buffer.copy_(self.bench.buffers.flat.buffer)
            recording.replay([ticket.batch])
        else:
            self._replay_at_older(ticket)
        slot.gradient.buffer.copy_(recording.gradient.buffer)
        slot.read_buffers.buffer.copy_(recording.start.buffer)
        slot.after_buffers.buffer.copy_(recording.after.buffer)
        slot.numbers.copy_(recording.numbers, non_blocking=True)
        slot.done.record()
        if self._compensation:
            self._versions_read[ticket.id] = self._snapshot(ticket.version)

    def _replay_at_older(self, ticket: Ticket) -> None:
        """The recording reads where the newest version is, so the older one goes there meanwhile."""
        assert self._newest is not None, "only a policy with a history starts tickets on older versions"
        flat, old = self.learner.flat, self._old[ticket.version]
        self._newest.buffer.copy_(flat.buffer)
        flat.buffer.copy_(old.flat.buffer)
        if old.buffers:
            torch._foreach_copy_(self._recording.start.views, old.buffers)
        self._recording.replay([ticket.batch])
        flat.buffer.copy_(self._newest.buffer)

    def _due(self, ticket: Ticket, slot: _Slot) -> Computed:
        slot.done.synchronize()
        loss, norm = slot.numbers.tolist()
        return Computed(loss, norm, self._versions_read.pop(ticket.id, None))

    def _give_back(self, ticket: Ticket) -> None:
        self._versions_read.pop(ticket.id, None)
        super()._give_back(ticket)
