"""Asynchronous arithmetic side by side: when a gradient is due, those that others have begun are computed with it."""

from __future__ import annotations

import torch

from quorate.engines._bench import Bench
from quorate.engines._lanes import Lanes
from quorate.engines._slots import Computed, Slot, Slotted
from quorate.events import Ticket
from quorate.policies import Policy


class _Slot(Slot):
    """point: the parameters to compute at."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.point = bench.learner.flat.copy()


class Abreast(Slotted[_Slot]):
    """As `Kept`, in a few large calls instead of many small ones.

    A ticket keeps a copy of the version it read. In the time that one of W workers takes the others begin anew once,
    so of W gradients nearly all can be computed in one go, on a GPU at little more than the cost of one. What
    is cancelled before is never computed. Chance (dropout, augmentation) is drawn for all of them at once.
    """

    arithmetic = "abreast"

    def __init__(self, bench: Bench, policy: Policy, lanes: Lanes) -> None:
        super().__init__(bench, policy, lanes.samples)
        self._lanes = lanes
        self._waiting: dict[int, Ticket] = {}  # begun, not computed; in the order in which they began
        self._numbers: dict[int, tuple[float, float]] = {}  # of those that are computed

    def _new_slot(self) -> _Slot:
        return _Slot(self.bench)

    def _begin(self, ticket: Ticket, slot: _Slot) -> None:
        if ticket.version == self.learner.version:
            slot.point.buffer.copy_(self.learner.flat.buffer)
            slot.read_buffers.buffer.copy_(self.bench.buffers.flat.buffer)
        else:
            old = self._old[ticket.version]
            slot.point.buffer.copy_(old.flat.buffer)
            if old.buffers:
                torch._foreach_copy_(slot.read_buffers.views, old.buffers)
        self._waiting[ticket.id] = ticket

    def _due(self, ticket: Ticket, slot: _Slot) -> Computed:
        if ticket.id in self._waiting:
            self._compute_with(ticket)
        return Computed(*self._numbers.pop(ticket.id), slot.point)

    def _compute_with(self, ticket: Ticket) -> None:
        """Compute this one, and as many of those that wait as there are lanes."""
        lanes = self._lanes
        others = [other for other in self._waiting.values() if other is not ticket]
        chosen = [ticket, *others[: lanes.count - 1]]
        slots = [self._slots[one.id] for one in chosen]
        _copy(lanes.points.rows, [slot.point.buffer for slot in slots])
        _copy(lanes.start.rows, [slot.read_buffers.buffer for slot in slots])
        lanes.compute([one.batch for one in chosen])
        _copy([slot.gradient.buffer for slot in slots], lanes.gradients.rows)
        _copy([slot.after_buffers.buffer for slot in slots], lanes.after.rows)
        for one, (loss, norm) in zip(chosen, lanes.numbers.tolist(), strict=False):
            self._numbers[one.id] = loss, norm
            del self._waiting[one.id]

    def _give_back(self, ticket: Ticket) -> None:
        self._waiting.pop(ticket.id, None)
        self._numbers.pop(ticket.id, None)
        super()._give_back(ticket)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Of one to the other, as many as both have."""
    count = min(len(targets), len(sources))
    if targets[0].numel():
        torch._foreach_copy_(targets[:count], sources[:count])
