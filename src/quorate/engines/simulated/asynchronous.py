"""Gradients of asynchronous policies: each ticket has its own gradient, computed at the version it read."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from quorate.engines.base import Outcome
from quorate.engines.shared.update import (
    KEPT,
    KEPT_HALF,
    Weights,
    compensate,
    finds_nan_early,
    leave_out_non_finite,
    mean_loss,
    mean_scales,
    noise_norms,
    scaled_sum,
    shares_of,
    takes_norms,
)
from quorate.engines.simulated.model import Strategy, WorkerModel, flatten_optimizer, vector_of
from quorate.events import Ticket
from quorate.flat import Flat
from quorate.learner import all_finite, global_norm, squared_norm
from quorate.policies import Policy


class TicketGradient(NamedTuple):
    """The gradient of a ticket, with its loss and the model's buffers."""

    grads: Sequence[Tensor | None]
    loss: float
    read_buffers: list[Tensor]  # before the forward pass
    buffers: list[Tensor]  # after the forward pass
    read: Flat | None  # the parameters it was computed at; only for delay compensation
    norm: float | None = None  # of the whole gradient, where it is known

    def existing(self) -> list[Tensor]:
        """Without the parameters that the loss does not depend on."""
        return [grad for grad in self.grads if grad is not None]


class _Version(NamedTuple):
    flat: Flat
    buffers: Flat


class KeptGradients(Strategy):
    """For policies that apply stale or weighted gradients.

    A gradient is computed when its ticket starts, while the parameters it reads are still the newest. Versions
    are copied only for policies that start tickets on older ones (`history`).
    """

    arithmetic = KEPT

    def __init__(self, worker: WorkerModel, policy: Policy, half: bool = False) -> None:
        super().__init__(worker)
        if half:
            self.arithmetic = KEPT_HALF
        self._half = half  # round gradients to bfloat16, as the 16-bit wire format does
        self._history = policy.history
        self._early = finds_nan_early(policy)
        self._compensation = self.learner.learning.delay_compensation or 0.0
        self._gradients: dict[int, TicketGradient | None] = {}  # None: not finite
        self._old: dict[int, _Version] = {}  # the last `history` versions before the newest one
        self._read: WeakValueDictionary[int, Flat] = WeakValueDictionary()  # version -> copy that gradients refer to

    def started(self, ticket: Ticket) -> None:
        self._gradients[ticket.id] = self._compute(ticket)

    def arrived(self, ticket: Ticket) -> bool:
        if self._gradients[ticket.id] is not None:
            return True
        del self._gradients[ticket.id]
        return False

    def ended(self, ticket: Ticket) -> None:
        self._gradients.pop(ticket.id, None)

    # ------------------------------------------------------------ computing

    def _compute(self, ticket: Ticket) -> TicketGradient | None:
        learner, buffers = self.learner, self.worker.buffers
        with self._reading(ticket.version) as read_buffers:
            loss = self.worker.backward([ticket.batch]).item()
            after = buffers.after_forward()
        there = self.worker.gradients()
        grads = [parameter.grad for parameter in learner.params]
        if self._half:
            grads = [None if grad is None else grad.bfloat16().to(grad.dtype) for grad in grads]
        learner.clear_gradients()
        if not math.isfinite(loss) or (self._early and not all_finite(there)):
            return None
        read = self._snapshot(ticket.version) if self._compensation else None
        return TicketGradient(grads, loss, read_buffers, after, read)

    @contextmanager
    def _reading(self, version: int) -> Iterator[list[Tensor]]:
        """Point the model at this version; yields a copy of the version's buffers."""
        if version == self.learner.version:
            yield self.worker.buffers.newest()
            return
        old = self._old[version]
        self.learner.point_at(old.flat)
        self.worker.buffers.load(old.buffers.views)
        yield old.buffers.views
        self.learner.point_at(self.learner.flat)

    def _snapshot(self, version: int) -> Flat:
        """A copy of a version's parameters, freed with the last gradient that refers to it."""
        if version in self._old:
            return self._old[version].flat
        flat = self._read.get(version)
        if flat is None:
            flat = self.learner.flat.copy()
            self._read[version] = flat
        return flat

    # ------------------------------------------------------------ applying

    def apply(self, tickets: tuple[Ticket, ...], weights: Weights) -> Outcome:
        arrivals = []
        for ticket in tickets:
            gradient = self._gradients.pop(ticket.id)
            assert gradient is not None, "a gradient that is not finite never arrives"
            arrivals.append((ticket, gradient))
            if self._compensation and ticket.version != self.learner.version:
                assert gradient.read is not None
                compensate(gradient.grads, self.learner.flat, gradient.read, self._compensation)
        self._keep_newest()
        outcome = self._make(arrivals, weights)
        return self._leave_out(arrivals, weights) if outcome is None else outcome

    def _make(self, arrivals: Sequence[tuple[Ticket, TicketGradient]], weights: Weights) -> Outcome | None:
        """Make the next version; None if the mean is not finite."""
        learner = self.learner
        tickets, gradients = zip(*arrivals, strict=True)
        measured = takes_norms(learner.version, tickets, weights, self._compensation)
        # Measured before averaging, which divides a parameter's gradient in place if only one ticket has it.
        first_sq = squared_norm(gradients[0].existing()) if measured else None
        scales, total = mean_scales(tickets, weights)
        for place, parameter in enumerate(learner.params):
            parameter.grad = scaled_sum([gradient.grads[place] for gradient in gradients], scales)
        if total != 1.0:
            torch._foreach_div_(learner.gradients(), total)
        if not all_finite(learner.gradients()):
            return None
        norms = None if first_sq is None else noise_norms(tickets, first_sq, squared_norm(learner.gradients()))
        norm = learner.norm_for_clipping()
        read = [None if ticket.version == learner.version else gradient.read_buffers for ticket, gradient in arrivals]
        self.worker.buffers.advance([gradient.buffers for gradient in gradients], shares_of(tickets), read)
        learner.step(norm)
        learner.clear_gradients()
        return Outcome(mean_loss(tickets, [gradient.loss for gradient in gradients]), norm, norms=norms)

    def _leave_out(self, arrivals: Sequence[tuple[Ticket, TicketGradient]], weights: Weights) -> Outcome:
        """Apply the finite gradients of an update whose mean is not finite, or make a version without any."""
        finite = [place for place, (_, gradient) in enumerate(arrivals) if all_finite(gradient.existing())]
        outcome, kept = leave_out_non_finite(arrivals, weights, finite, self._make)
        if outcome is None:
            self.learner.clear_gradients()
            self.learner.skip()
            outcome = Outcome(None, None)
        refused = tuple(ticket for place, (ticket, _) in enumerate(arrivals) if place not in kept)
        return outcome._replace(refused=refused)

    def _keep_newest(self) -> None:
        """Copy the newest version before it is overwritten, if tickets may still be started on it."""
        if not self._history:
            return
        version = self.learner.version
        spare = self._old.pop(version - self._history, None)
        # With delay compensation a gradient may still refer to the oldest copy, so its memory is not reused.
        flat = self.learner.flat.copy() if spare is None or self._compensation else spare.flat
        flat.buffer.copy_(self.learner.flat.buffer)
        self._old[version] = _Version(flat, self.worker.buffers.flat.copy())


class GradientMemory:
    """Memory of one gradient, used from the start of its ticket until it is applied or dropped."""

    def __init__(self, worker: WorkerModel) -> None:
        flat = worker.learner.flat
        self.gradient = Flat(flat.layout, flat.buffer.device)
        self.vector: Tensor = vector_of(self.gradient)
        self.read_buffers, self.after_buffers = worker.buffers.flat.copy(), worker.buffers.flat.copy()


class GradientFacts(NamedTuple):
    """Loss and norm of a gradient on the CPU."""

    loss: float
    norm: float
    read: Flat | None  # the parameters it was computed at; only for delay compensation


SlotT = TypeVar("SlotT", bound=GradientMemory)


class PooledGradients(KeptGradients, Generic[SlotT]):
    """Reuses the memory of gradients. Batches of an unusual size are computed as in `KeptGradients`."""

    def __init__(self, worker: WorkerModel, policy: Policy, samples: int) -> None:
        super().__init__(worker, policy)
        self._samples = samples
        self._free: list[SlotT] = []
        self._slots: dict[int, SlotT] = {}  # by ticket
        self._flat_optimizer = flatten_optimizer(self.learner)

    @abstractmethod
    def _begin(self, ticket: Ticket) -> SlotT:
        """Compute the ticket's gradient now, or defer it until it is due; returns its slot."""

    @abstractmethod
    def _due(self, ticket: Ticket, slot: SlotT) -> GradientFacts:
        """The slot's gradient is due; computes it if it was deferred."""

    @abstractmethod
    def _new_slot(self) -> SlotT: ...

    # ------------------------------------------------------------ computing

    def started(self, ticket: Ticket) -> None:
        if ticket.samples != self._samples:  # the last batch of an epoch may be smaller
            super().started(ticket)
            return
        self._slots[ticket.id] = self._begin(ticket)

    def _free_slot(self) -> SlotT:
        return self._free.pop() if self._free else self._new_slot()

    def arrived(self, ticket: Ticket) -> bool:
        slot = self._slots.get(ticket.id)
        if slot is None:
            return super().arrived(ticket)
        loss, norm, read = self._due(ticket, slot)
        if not math.isfinite(norm):  # perhaps only the square of an element overflowed
            norm = global_norm([slot.vector])
        if not math.isfinite(loss) or (self._early and not math.isfinite(norm)):
            self._release(ticket)
            return False
        self._gradients[ticket.id] = TicketGradient(
            slot.gradient.views, loss, slot.read_buffers.views, slot.after_buffers.views, read, norm
        )
        return True

    def ended(self, ticket: Ticket) -> None:
        super().ended(ticket)
        self._release(ticket)

    def _release(self, ticket: Ticket) -> None:
        slot = self._slots.pop(ticket.id, None)
        if slot is not None:
            self._free.append(slot)

    # ------------------------------------------------------------ applying

    def apply(self, tickets: tuple[Ticket, ...], weights: Weights) -> Outcome:
        slot = self._slots.get(tickets[0].id)
        is_plain = len(tickets) == 1 and weights is None and not self._compensation
        if is_plain and slot is not None and self._flat_optimizer is not None:
            outcome = self._apply_alone(tickets[0], slot)
        else:
            outcome = super().apply(tickets, weights)
        for ticket in tickets:
            self._release(ticket)
        return outcome

    def _apply_alone(self, ticket: Ticket, slot: SlotT) -> Outcome:
        """Apply one gradient in as few calls as possible, with the same result as `KeptGradients.apply`."""
        assert self._flat_optimizer is not None
        learner = self.learner
        gradient = self._gradients.pop(ticket.id)
        assert gradient is not None and gradient.norm is not None, "a gradient that is not finite never arrives"
        self._keep_newest()
        if not math.isfinite(gradient.norm):  # policies with rounds check gradients only here (`finds_nan_early`)
            learner.skip()
            return Outcome(None, None, (ticket,))
        is_fresh = ticket.version == learner.version
        self.worker.buffers.advance_by(slot.after_buffers, None if is_fresh else slot.read_buffers)
        norm = None if learner.learning.clip_norm is None else gradient.norm
        self._flat_optimizer.gradient = slot.vector
        learner.step(norm, (slot.vector,))
        return Outcome(gradient.loss, norm)
