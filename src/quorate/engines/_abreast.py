"""Asynchronous arithmetic side by side: when a gradient is due, those that others have begun are computed with it."""

from __future__ import annotations

import torch

from quorate.engines._bench import Bench
from quorate.engines._lanes import Lanes
from quorate.engines._slots import Computed, Slot, Slotted
from quorate.events import Ticket
from quorate.learner import global_norm
from quorate.policies import Policy


class _Slot(Slot):
    """point: the parameters to compute at. numbers: loss and norm; None: not computed yet."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self.point = bench.learner.flat.copy()
        self.numbers: tuple[float, float] | None = None


class Abreast(Slotted[_Slot]):
    """As `Kept`, in a few large calls instead of many small ones.

    A ticket keeps a copy of the version it read. In the time that one of W workers takes the others begin anew once,
    so of W gradients nearly all can be computed in one go. What is cancelled before is never computed. Chance
    (dropout, augmentation) is drawn for all of them at once.

    One worker whose gradients are used late (`Delayed`) reads versions that are long known: there, the tickets that
    come next are foreseen, and computed with the one that is due. One that does not come was computed in vain.
    """

    arithmetic = "abreast"

    def __init__(self, bench: Bench, policy: Policy, lanes: Lanes) -> None:
        super().__init__(bench, policy, lanes.samples)
        self._lanes = lanes
        self._waiting: dict[int, Ticket] = {}  # begun, not computed; in the order in which they began
        self._foreseen: dict[tuple[int, int], _Slot] = {}  # by batch and version: computed, not begun

    def _new_slot(self) -> _Slot:
        return _Slot(self.bench)

    # ------------------------------------------------------------ beginning

    def _slot_for(self, ticket: Ticket) -> _Slot:
        foreseen = self._foreseen.pop((ticket.batch, ticket.version), None)
        return self._slot_reading(ticket.version) if foreseen is None else foreseen

    def _begin(self, ticket: Ticket, slot: _Slot) -> None:
        if slot.numbers is None:
            self._waiting[ticket.id] = ticket

    def _slot_reading(self, version: int) -> _Slot:
        slot = self._free_slot()
        slot.numbers = None
        if version == self.learner.version:
            slot.point.buffer.copy_(self.learner.flat.buffer)
            slot.read_buffers.buffer.copy_(self.bench.buffers.flat.buffer)
        else:
            old = self._old[version]
            slot.point.buffer.copy_(old.flat.buffer)
            if old.buffers:
                torch._foreach_copy_(slot.read_buffers.views, old.buffers)
        return slot

    # ------------------------------------------------------------ computing

    def _due(self, ticket: Ticket, slot: _Slot) -> Computed:
        if slot.numbers is None:
            self._compute_with(ticket)
            assert slot.numbers is not None
        return Computed(*slot.numbers, slot.point)

    def _compute_with(self, ticket: Ticket) -> None:
        """Compute this one, and as many of those that wait, or will come, as there are lanes."""
        lanes = self._lanes
        others = [other for other in self._waiting.values() if other is not ticket]
        chosen = [ticket, *others[: lanes.count - 1]]
        self._foresee(ticket, lanes.count - len(chosen))
        batches = [*(one.batch for one in chosen), *(batch for batch, _ in self._foreseen)]
        slots = [*(self._slots[one.id] for one in chosen), *self._foreseen.values()]
        _copy(lanes.points.rows, [slot.point.buffer for slot in slots])
        _copy(lanes.start.rows, [slot.read_buffers.buffer for slot in slots])
        try:
            lanes.compute(batches)
        except Exception:  # say, a collate that left a sample out; a mistake in the loss comes up once more
            self._compute_alone(ticket)
            return
        _copy([slot.gradient.buffer for slot in slots], lanes.gradients.rows)
        _copy([slot.after_buffers.buffer for slot in slots], lanes.after.rows)
        for slot, (loss, norm) in zip(slots, lanes.numbers.tolist(), strict=False):
            slot.numbers = loss, norm
        for one in chosen:
            del self._waiting[one.id]

    def _compute_alone(self, ticket: Ticket) -> None:
        """Where something in the data keeps it, or others, from going side by side this time."""
        slot, learner, buffers = self._slots[ticket.id], self.learner, self.bench.buffers
        learner.point_at(slot.point)
        buffers.load(slot.read_buffers.views)
        try:
            loss = self.bench.backward([ticket.batch]).item()
            buffers.save(slot.after_buffers.views)
        finally:
            learner.point_at(learner.flat)
            buffers.reset()
        for view, parameter in zip(slot.gradient.views, learner.params, strict=True):
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
        learner.clear_gradients()
        slot.numbers = loss, global_norm([slot.vector])
        del self._waiting[ticket.id]

    def _foresee(self, ticket: Ticket, most: int) -> None:
        """Slots for the tickets after this one, if all goes on as it is, that read versions which are there."""
        self._free += self._foreseen.values()  # they did not come
        self._foreseen.clear()
        if not self._history or len(self._slots) > 1:
            return
        for ahead in range(1, most + 1):
            batch, version = ticket.batch + ahead, ticket.version + ahead
            is_there = version == self.learner.version or version in self._old
            if not is_there or self.bench.ledger.size(batch) != self._samples:
                break
            self._foreseen[batch, version] = self._slot_reading(version)

    def _give_back(self, ticket: Ticket) -> None:
        self._waiting.pop(ticket.id, None)
        super()._give_back(ticket)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Of one to the other, as many as both have."""
    count = min(len(targets), len(sources))
    if targets[0].numel():
        torch._foreach_copy_(targets[:count], sources[:count])
