"""Buffers of a model, such as BatchNorm statistics: how forward passes of several workers make the next version."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from quorate.flat import Flat


class Buffers:
    """The buffers of the newest version, and those that the model uses, which a forward pass changes.

    - Float buffers become the average over the applied arrivals, weighted by samples.
    - A stale arrival contributes its change of a float buffer.
    - A stale arrival contributes its batch statistics to a running average, which are averaged into the newest value.
      If its change were added instead, each of many stale arrivals would correct the same error once more, and from
      about ten workers on the average would oscillate with growing amplitude.
    - Integers (the number of batches seen) increase as they do for one worker.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = BufferSlots(model)
        live = self._slots.tensors()
        #: Buffers of the newest version, in one piece.
        self.flat = Flat.copy_of(live, live[0].device if live else torch.device("cpu"))
        floats = sum(buffer.is_floating_point() for buffer in live)  # floats come first
        self._newest, self._newest_counters = self.flat.views[:floats], self.flat.views[floats:]
        self.any = bool(live)
        self._model_is_behind = False  # the model's buffers are not those of the newest version
        momenta = {id(buffer): momentum for buffer, momentum in _running_averages(model)}
        #: By float buffer: the fraction of a running average that a batch replaces; 0 for other buffers.
        self._momenta = [momenta.get(id(buffer), 0.0) for buffer in live[:floats]]
        self._running = [place for place, momentum in enumerate(self._momenta) if momentum]
        self._momentum = Flat(self.flat.layout, self.flat.buffer.device)
        for view, momentum in zip(self._momentum.views, self._momenta, strict=False):
            view.fill_(momentum)
        kinds = {(buffer.dtype, buffer.device) for buffer in self._newest}
        #: Floats of one dtype and device, and integers: `_add_change` updates them in few calls.
        self._plain = len(kinds) == 1 and all(
            not counter.is_complex() and counter.dtype != torch.bool for counter in self._newest_counters
        )

    def live(self) -> list[Tensor]:
        """The buffers that the model uses, in the order of `flat`."""
        return self._slots.tensors()

    def after_forward(self) -> list[Tensor]:
        """Copy the model's buffers after a forward pass, and reset the model to the newest version's."""
        if not self.any:
            return []
        after = _copies(self._slots.tensors())
        self.reset()
        return after

    def newest(self) -> list[Tensor]:
        """Copy the buffers of the newest version."""
        return _copies(self.flat.views)

    def load(self, buffers: list[Tensor]) -> None:
        """Copy these buffers into the model."""
        self._model_is_behind = False
        _copy_into(self._slots.tensors(), buffers)

    def save(self, into: list[Tensor]) -> None:
        """Copy the model's buffers into these tensors."""
        _copy_into(into, self._slots.tensors())

    def left_behind(self) -> None:
        """A CUDA graph has changed the model's buffers."""
        self._model_is_behind = self.any

    def settle(self) -> None:
        """Copy the newest version's buffers into the model, if it may have others."""
        if self._model_is_behind:
            self.reset()

    def reset(self) -> None:
        """Copy the newest version's buffers into the model."""
        self._model_is_behind = False
        _copy_into(self._slots.tensors(), self.flat.views)

    def advance(
        self, after: list[list[Tensor]], shares: list[float], read: list[list[Tensor] | None] | None = None
    ) -> None:
        """Compute the next version's buffers.

        after: the buffers after each arrival's forward pass. read: the buffers it started with, if it is stale.
        """
        if not self.any:
            return
        newest = self.flat.views
        if len(after) == 1 and (read is None or read[0] is None):
            _copy_into(newest, after[0])  # exact, so that one worker equals a plain loop
        elif len(after) == 1 and self._plain:
            assert read is not None and read[0] is not None
            self._add_change(after[0], read[0])
        else:
            began = [given or newest for given in (read or [None] * len(after))]
            for place, now in enumerate(newest):
                if now.dtype == torch.bool or now.is_complex():  # a mask or a table, not statistics
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
        """As `advance` for one arrival, in few calls. The model gets the buffers with `settle`."""
        if not self.any:
            return
        self._model_is_behind = True
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
        """Apply one stale arrival in few calls: a deep net has hundreds of buffers, and each call costs GPU time."""
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
    """Names of a model's buffers in its modules: a forward pass may replace a tensor (`self.seen = self.seen + 1`)."""

    def __init__(self, model: nn.Module) -> None:
        places = {id(module._buffers): module._buffers for module in model.modules()}
        found: dict[int, tuple[dict[str, Tensor | None], str]] = {}  # a shared tensor is kept once
        for place in places.values():
            for name, buffer in place.items():
                if buffer is not None:
                    found.setdefault(id(buffer), (place, name))
        self._slots = sorted(found.values(), key=lambda slot: not _tensor(slot).is_floating_point())

    def tensors(self) -> list[Tensor]:
        """The current buffers: floats, which are averaged, come first."""
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
    """BatchNorm statistics, each with the fraction that a batch replaces."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.momentum is not None:
            for buffer in (module.running_mean, module.running_var):
                if buffer is not None:
                    yield buffer, module.momentum


def _change(after: Tensor, before: Tensor) -> Tensor:
    """after − before; 0 where they are equal, also where both are infinite, as in an attention mask."""
    return torch.where(after == before, torch.zeros_like(after), after - before)
