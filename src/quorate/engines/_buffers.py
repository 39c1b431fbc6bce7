"""BatchNorm statistics and other buffers of a model: what a forward pass does to them, and what a version has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quorate.flat import Flat


class Buffers:
    """BatchNorm statistics and the like. A forward pass changes them; the newest version has the average.

    Float buffers are averaged over the kept arrivals, weighted by samples. Of a stale arrival it is the
    change that counts; of a running average it is the batch, averaged into the newest value. (Were it the change, each
    of many stale arrivals would correct the same error once more, and from some ten workers on the average would swing
    ever wider.) Whole numbers (how many batches were seen) go up as they do for one worker.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = BufferSlots(model)
        live = self._slots.tensors()
        #: Those of the newest version, in one piece.
        self.flat = Flat.copy_of(live, live[0].device if live else torch.device("cpu"))
        floats = sum(buffer.is_floating_point() for buffer in live)  # they come first
        self._newest, self._newest_counters = self.flat.views[:floats], self.flat.views[floats:]
        self.any = bool(live)
        self._are_elsewhere = False  # the newest are known, but the model does not see them yet
        momenta = {id(buffer): momentum for buffer, momentum in _running_averages(model)}
        #: By float buffer: how much of a running average a batch replaces; 0 for what is none.
        self._momenta = [momenta.get(id(buffer), 0.0) for buffer in live[:floats]]
        self._running = [place for place, momentum in enumerate(self._momenta) if momentum]
        self._momentum = Flat(self.flat.layout, self.flat.buffer.device)
        for view, momentum in zip(self._momentum.views, self._momenta, strict=False):
            view.fill_(momentum)
        kinds = {(buffer.dtype, buffer.device) for buffer in self._newest}
        #: Floats of one kind and whole numbers: statistics that can be handled all at once.
        self._plain = len(kinds) == 1 and all(
            not counter.is_complex() and counter.dtype != torch.bool for counter in self._newest_counters
        )

    def live(self) -> list[Tensor]:
        """Those that the model sees, in the order of `flat`."""
        return self._slots.tensors()

    def after_forward(self) -> list[Tensor]:
        """A copy of what the forward pass made of them; the model gets those of the newest version back."""
        if not self.any:
            return []
        after = _copies(self._slots.tensors())
        self.reset()
        return after

    def newest(self) -> list[Tensor]:
        """A copy of the newest version's."""
        return _copies([*self._newest, *self._newest_counters])

    def load(self, buffers: list[Tensor]) -> None:
        """Let the model see these."""
        self._are_elsewhere = False
        _copy_into(self._slots.tensors(), buffers)

    def save(self, into: list[Tensor]) -> None:
        """Copy those that the model sees."""
        _copy_into(into, self._slots.tensors())

    def left_behind(self) -> None:
        """Something that was recorded has changed those that the model sees."""
        self._are_elsewhere = self.any

    def settle(self) -> None:
        """Let the model see the newest version's, if it may see others."""
        if self._are_elsewhere:
            self.reset()

    def reset(self) -> None:
        """Let the model see the newest version's."""
        self._are_elsewhere = False
        _copy_into(self._slots.tensors(), [*self._newest, *self._newest_counters])

    def advance(
        self, after: list[list[Tensor]], shares: list[float], read: list[list[Tensor] | None] | None = None
    ) -> None:
        """The next version's, from those after each arrival's forward; `read` has those a stale one began with."""
        if not self.any:
            return
        newest = [*self._newest, *self._newest_counters]
        if len(after) == 1 and (read is None or read[0] is None):
            _copy_into(newest, after[0])  # as it is: one worker equals a plain loop
        elif len(after) == 1 and self._plain:
            assert read is not None and read[0] is not None
            self._add_change(after[0], read[0])
        else:
            began = [given or newest for given in (read or [None] * len(after))]
            for place, now in enumerate(newest):
                if now.dtype == torch.bool or now.is_complex():  # a mask, a table: no statistics
                    now.copy_(after[-1][place])
                    continue
                changes = torch.stack([_change(a[place], b[place]) for a, b in zip(after, began, strict=True)])
                if now.is_floating_point():
                    momentum = self._momenta[place]
                    if momentum and read is not None:
                        changes += momentum * (torch.stack([b[place] for b in began]) - now)
                    weights = torch.tensor(shares, dtype=now.dtype, device=now.device)
                    now.add_(torch.tensordot(weights, changes, dims=1))
                else:
                    now.add_(changes.amax(0))
        self.reset()

    def advance_by(self, after: Flat, read: Flat | None) -> None:
        """The next version's from one arrival: as `advance`, in few calls. The model sees them after `settle`."""
        if not self.any:
            return
        self._are_elsewhere = True
        if read is None:
            self.flat.buffer.copy_(after.buffer)
        else:
            runs = (flat.layout.runs(flat.buffer) for flat in (self.flat, after, read, self._momentum))
            for now, later, earlier, momentum in zip(*runs, strict=True):
                if now.dtype == torch.bool or now.is_complex():
                    now.copy_(later)
                    continue
                change = _change(later, earlier)
                if self._running and now.is_floating_point():
                    change += torch.where(momentum == 0, momentum, momentum * (earlier - now))
                now.add_(change)

    def _add_change(self, after: list[Tensor], before: list[Tensor]) -> None:
        """Of one stale arrival, in few calls: a deep net has hundreds of buffers, and each call costs time on a GPU."""
        floats = len(self._newest)
        then, now = (torch.cat([buffer.reshape(-1) for buffer in side[:floats]]) for side in (before, after))
        pieces = torch.split(_change(now, then), [buffer.numel() for buffer in self._newest])
        shaped = [piece.view(buffer.shape) for piece, buffer in zip(pieces, self._newest, strict=True)]
        if self._running:
            behind = torch._foreach_sub(
                [before[at] for at in self._running], [self._newest[at] for at in self._running]
            )
            torch._foreach_mul_(behind, [self._momenta[at] for at in self._running])
            torch._foreach_add_([shaped[at] for at in self._running], behind)
        torch._foreach_add_(self._newest, shaped)
        for counter, later, earlier in zip(self._newest_counters, after[floats:], before[floats:], strict=True):
            counter.add_(later - earlier)


class BufferSlots:
    """Where a model keeps its buffers. A forward pass may put another tensor there (`self.seen = self.seen + 1`)."""

    def __init__(self, model: nn.Module) -> None:
        places = {id(module._buffers): module._buffers for module in model.modules()}
        found: dict[int, tuple[dict[str, Tensor | None], str]] = {}  # a tensor that several modules share, once
        for place in places.values():
            for name, buffer in place.items():
                if buffer is not None:
                    found.setdefault(id(buffer), (place, name))
        slots = list(found.values())
        self._slots = sorted(slots, key=lambda slot: not _tensor(slot).is_floating_point())

    def tensors(self) -> list[Tensor]:
        """The buffers as they are now: those that are averaged, then the others."""
        return [_tensor(slot) for slot in self._slots]


def _tensor(slot: tuple[dict[str, Tensor | None], str]) -> Tensor:
    found = slot[0][slot[1]]
    assert found is not None, f"the buffer {slot[1]} was there and is None now"
    return found


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    _copy_into(copies, tensors)
    return copies


def _copy_into(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _running_averages(model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Statistics of BatchNorm with the share of them that a batch replaces."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.momentum is not None:
            for buffer in (module.running_mean, module.running_var):
                if buffer is not None:
                    yield buffer, module.momentum


def _change(after: Tensor, before: Tensor) -> Tensor:
    """after − before; nothing where they are equal, also where both are infinite, as in an attention mask."""
    return torch.where(after == before, torch.zeros_like(after), after - before)
