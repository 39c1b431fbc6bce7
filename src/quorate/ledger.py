"""The ledger of batches: each sample is used exactly once per epoch, whichever gradients are dropped or lost.

An epoch is a seeded permutation of the samples, cut into batches. A ticket borrows a batch. Applying the ticket
spends the batch; dropping or losing the ticket gives the batch back to the front of the queue. The order of the
batches does not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quorate.errors import BadInput
from quorate.events import Ticket
from quorate.seeds import GOLDEN64, derive

#: A batch is pinned after as many drops in a row as would happen by chance with this probability.
PIN_CHANCE = 1e-6
PIN_AFTER_AT_LEAST = 3
#: A batch whose gradient was refused (NaN or Inf) this often is set aside for the epoch.
REFUSALS_ALLOWED = 3


class Loan(NamedTuple):
    """A borrowed batch: its number, its size, and whether the round must wait for it."""

    batch: int
    samples: int
    pinned: bool


class Ledger:
    """Lends batches and counts drops and uses.

    samples: size of the data set, or None for an endless stream in which an index is a seed.
    epochs: how many epochs to lend (None: no end).
    """

    def __init__(self, samples: int | None, batch_size: int, epochs: int | None = None, seed: int = 0) -> None:
        if batch_size < 1:
            raise BadInput(f"batch_size is {batch_size}, but a batch holds at least 1 sample")
        if epochs is not None and epochs < 1:
            raise BadInput(f"epochs is {epochs}, but it must be at least 1")
        if samples is None:
            if epochs is not None:
                raise BadInput("an endless stream has no epochs; give updates or until instead")
        elif samples < 1:
            raise BadInput("the data set is empty; train_data() must give at least one sample")
        elif batch_size > samples:
            raise BadInput(
                f"batch_size is {batch_size}, but the data set has only {samples} samples; "
                f"choose a batch of at most {samples}"
            )
        self.samples, self.batch_size, self.epochs, self.seed = samples, batch_size, epochs, seed
        #: Batches in an epoch (None: endless).
        self.batches_per_epoch = None if samples is None else math.ceil(samples / batch_size)
        self._last_size = (
            batch_size if samples is None else samples - (math.ceil(samples / batch_size) - 1) * batch_size
        )
        self._next = 0  # number of the next fresh batch
        self._stop_at = self.batches_per_epoch  # first batch of the epoch after the open one
        self._fresh_round: int | None = None  # round that got the last fresh batch
        self._returned: deque[int] = deque()
        self._set_aside: deque[int] = deque()  # refused batches: tried again after everything else
        self._drops: dict[int, int] = {}  # of batches not yet spent
        self._refusals: dict[int, int] = {}
        self._out = 0  # batches lent and not yet back
        # For the rate of drops, which pinning compares with. It starts with one fictitious spend, so it is never 1.
        self._spent_count, self._drop_count = 1, 0
        self._pin_after = PIN_AFTER_AT_LEAST
        self._known: tuple[int, list[int]] | None = None  # cache: the epoch last asked for, and its order

    # ------------------------------------------------------------ lending

    def borrow(self, round: int | None, worker: int | None = None) -> Loan | None:
        """The next batch: a returned one, else a fresh one; None if there is no batch for this round.

        The fresh batches of one round come from one epoch, so the last round of an epoch may be short. `worker`
        makes no difference here; subclasses may use it.
        """
        if self._returned:
            batch = self._returned.popleft()
            pinned = self._is_pinned(batch)
        else:
            pinned = False
            batch = self._next
            if batch == self._stop_at and self._set_aside:
                batch = self._set_aside.popleft()
            elif batch == self._stop_at and not self._open_epoch(round):
                return None
            else:
                self._next = batch + 1
                self._fresh_round = round
        self._out += 1
        return Loan(batch, self.size(batch), pinned)

    def _is_pinned(self, batch: int) -> bool:
        return bool(self._drops) and self._drops.get(batch, 0) >= self._pin_after

    def _open_epoch(self, round: int | None) -> bool:
        assert self.batches_per_epoch is not None and self._stop_at is not None
        if round is not None and round == self._fresh_round and self._out:
            return False
        if self.epochs is not None and self._stop_at >= self.epochs * self.batches_per_epoch:
            return False
        self._stop_at += self.batches_per_epoch
        return True

    def spend(self, tickets: Sequence[Ticket]) -> None:
        """The batches of these tickets were applied."""
        self._out -= len(tickets)
        self._spent_count += len(tickets)
        if self._drops:
            for ticket in tickets:
                self._drops.pop(ticket[4], None)
        if self._refusals:
            for ticket in tickets:
                self._refusals.pop(ticket[4], None)

    def give_back(self, batch: int) -> None:
        """The batch was dropped: it goes to the front of the queue. It is pinned after too many drops for chance."""
        self._out -= 1
        self._returned.append(batch)
        self._drops[batch] = self._drops.get(batch, 0) + 1
        self._drop_count += 1
        if self._drop_count & (self._drop_count - 1) == 0 or not self._drop_count % 1024:
            rate = self._drop_count / (self._drop_count + self._spent_count)
            self._pin_after = max(PIN_AFTER_AT_LEAST, math.ceil(math.log(PIN_CHANCE) / math.log(rate)))

    def lose(self, batch: int) -> None:
        """The batch was lost with its worker: it goes to the front of the queue, and no drop is counted."""
        self._out -= 1
        self._returned.append(batch)

    def refuse(self, batch: int) -> bool:
        """The batch gave NaN or Inf: try it again last. False if it did so too often and is given up."""
        self._out -= 1
        if self.batches_per_epoch is None:
            return False  # a stream always has another batch
        times = self._refusals[batch] = self._refusals.get(batch, 0) + 1
        if times >= REFUSALS_ALLOWED:
            del self._refusals[batch]
            self._drops.pop(batch, None)
            return False
        self._set_aside.append(batch)
        return True

    @property
    def finished(self) -> bool:
        """Every batch of every epoch is spent (or was given up)."""
        if self.epochs is None or self.batches_per_epoch is None or self._out or self._next != self._stop_at:
            return False
        return self._next == self.epochs * self.batches_per_epoch and not self._returned and not self._set_aside

    # ------------------------------------------------------------ contents of a batch

    def size(self, batch: int) -> int:
        """How many samples a batch holds; the last of an epoch may be short."""
        per_epoch = self.batches_per_epoch
        return self.batch_size if per_epoch is None or (batch + 1) % per_epoch else self._last_size

    def indices(self, batch: int) -> list[int]:
        """The samples of a batch; in an endless stream, the seeds."""
        if self.batches_per_epoch is None:
            start = batch * self.batch_size
            return list(range(start, start + self.batch_size))
        epoch, place = divmod(batch, self.batches_per_epoch)
        start = place * self.batch_size
        if self._known is None or self._known[0] != epoch:
            self._known = epoch, self.order(epoch).tolist()
        return self._known[1][start : start + self.batch_size]

    def order(self, epoch: int, device: torch.device | None = None) -> Tensor:
        """The samples of an epoch [samples] in the order in which its batches hold them."""
        assert self.samples is not None
        return shuffled(self.samples, derive(self.seed, "epoch", epoch), device)

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs, as JSON values. Open tickets give their batches back after a resume."""
        return {
            "next": self._next,
            "stop_at": self._stop_at,
            "fresh_round": self._fresh_round,
            "returned": list(self._returned),
            "set_aside": list(self._set_aside),
            "drops": [list(pair) for pair in self._drops.items()],
            "refusals": [list(pair) for pair in self._refusals.items()],
            "out": self._out,
            "counts": [self._spent_count, self._drop_count, self._pin_after],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` gave."""
        self._next, self._stop_at = state["next"], state["stop_at"]
        self._fresh_round = state["fresh_round"]
        self._returned = deque(state["returned"])
        self._set_aside = deque(state["set_aside"])
        self._drops = dict(state["drops"])
        self._refusals = dict(state["refusals"])
        self._out = state["out"]
        self._spent_count, self._drop_count, self._pin_after = state["counts"]


def shuffled(count: int, key: int, device: torch.device | None = None) -> Tensor:
    """The numbers 0 … count−1 in an order drawn by `key`, the same on every machine and release of torch.

    They are sorted by a hash: `seeds.mix64`, computed with signed 64-bit tensors that wrap around.
    """
    z = torch.arange(count, dtype=torch.int64, device=device) * _signed(GOLDEN64) + _signed(key)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return torch.argsort(z ^ _shifted(z, 31), stable=True)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z >> bits as for unsigned numbers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
