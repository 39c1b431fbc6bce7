"""Asynchronous arithmetic whose gradients live in memory that is used again, each in one piece."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from quorate.engines._bench import Bench
from quorate.engines._kept import Gradient, Kept
from quorate.engines._one_vector import as_one_vector, vector_of
from quorate.engines.base import Outcome
from quorate.events import Ticket
from quorate.flat import Flat
from quorate.learner import global_norm
from quorate.policies import Policy


class Slot:
    """Where a gradient lives from its ticket's start until it is applied or dropped."""

    def __init__(self, bench: Bench) -> None:
        flat = bench.learner.flat
        self.gradient = Flat(flat.layout, flat.buffer.device)
        self.vector: Tensor = vector_of(self.gradient)
        self.read_buffers, self.after_buffers = bench.buffers.flat.copy(), bench.buffers.flat.copy()


class Computed(NamedTuple):
    """What is known of a gradient on the CPU, and what delay compensation wants of it."""

    loss: float
    norm: float
    read: Flat | None


SlotT = TypeVar("SlotT", bound=Slot)


class Slotted(Kept, Generic[SlotT]):
    """As `Kept`, for batches of the usual size; others are computed as there."""

    def __init__(self, bench: Bench, policy: Policy, samples: int) -> None:
        super().__init__(bench, policy)
        self._samples = samples
        self._free: list[SlotT] = []
        self._slots: dict[int, SlotT] = {}  # by ticket
        self._one_vector = as_one_vector(self.learner)

    @abstractmethod
    def _begin(self, ticket: Ticket, slot: SlotT) -> None:
        """Let the slot's gradient be computed, now or until it is due."""

    @abstractmethod
    def _due(self, ticket: Ticket, slot: SlotT) -> Computed:
        """The slot's gradient is wanted now."""

    @abstractmethod
    def _new_slot(self) -> SlotT: ...

    # ------------------------------------------------------------ computing

    def started(self, ticket: Ticket) -> None:
        if ticket.samples != self._samples:  # the last batch of an epoch may be smaller
            super().started(ticket)
            return
        slot = self._slots[ticket.id] = self._slot_for(ticket)
        self._begin(ticket, slot)

    def _slot_for(self, ticket: Ticket) -> SlotT:
        return self._free_slot()

    def _free_slot(self) -> SlotT:
        return self._free.pop() if self._free else self._new_slot()

    def arrived(self, ticket: Ticket) -> bool:
        slot = self._slots.get(ticket.id)
        if slot is None:
            return super().arrived(ticket)
        loss, norm, read = self._due(ticket, slot)
        if not math.isfinite(norm):  # or only a square of it is not
            norm = global_norm([slot.vector])
        if not math.isfinite(loss) or (self._early and not math.isfinite(norm)):
            self._give_back(ticket)
            return False
        self._gradients[ticket.id] = Gradient(
            slot.gradient.views, loss, slot.read_buffers.views, slot.after_buffers.views, read, norm
        )
        return True

    def ended(self, ticket: Ticket, arrived: bool) -> None:
        super().ended(ticket, arrived)
        self._give_back(ticket)

    def _give_back(self, ticket: Ticket) -> None:
        slot = self._slots.pop(ticket.id, None)
        if slot is not None:
            self._free.append(slot)

    # ------------------------------------------------------------ applying

    def apply(self, tickets: tuple[Ticket, ...], weights: tuple[float, ...] | None) -> Outcome:
        slot = self._slots.get(tickets[0].id)
        is_plain = len(tickets) == 1 and weights is None and not self._compensation
        if is_plain and slot is not None and self._one_vector is not None:
            outcome = self._apply_alone(tickets[0], slot)
        else:
            outcome = super().apply(tickets, weights)
        for ticket in tickets:
            self._give_back(ticket)
        return outcome

    def _apply_alone(self, ticket: Ticket, slot: SlotT) -> Outcome:
        """One gradient as it is: the same as any other way, in as few calls as can be."""
        assert self._one_vector is not None
        learner = self.learner
        gradient = self._gradients.pop(ticket.id)
        assert gradient is not None and gradient.norm is not None, "what is not finite never arrived"
        self._keep_newest()
        if not math.isfinite(gradient.norm):  # of a policy that looks for that only now
            learner.skip()
            return Outcome(None, None, (ticket,))
        is_fresh = ticket.version == learner.version
        self.bench.buffers.advance_by(slot.after_buffers, None if is_fresh else slot.read_buffers)
        norm = None if learner.learning.clip_norm is None else gradient.norm
        self._one_vector.gradient = slot.vector
        learner.step(norm, (slot.vector,))
        return Outcome(gradient.loss, norm)
