"""What there is before something is tried on a model and its task: to see whether it changed, and to get it back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quorate.engines._bench import Bench

#: Values that are what they say: another one means that Python has counted, or has gone another way.
_PLAIN = (bool, int, float, str)


class Before:
    """Parameters, Python's chance, and what task and modules hold in Python."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._parameters = bench.learner.flat.buffer.clone()
        self._chance = random.getstate()
        self._held = [(place, place.copy()) for place in places(bench)]

    def has_other_parameters(self) -> bool:
        """Whether a forward pass has written into them."""
        return not torch.equal(self._parameters, self._bench.learner.flat.buffer)

    def restore(self) -> None:
        self._bench.learner.flat.buffer.copy_(self._parameters)
        random.setstate(self._chance)
        for place, held in self._held:
            place.clear()
            place.update(held) if isinstance(place, dict) else place.extend(held)
        self._bench.learner.clear_gradients()
        self._bench.buffers.reset()


def repeats_itself(bench: Bench, batches: Sequence[int]) -> bool:
    """Whether a loss does the same in Python each time, as far as can be seen: no counter goes on, nothing is drawn.

    Of what is recorded, or computed for several at once, the Python is done once. Call it where the first call, which
    may set something up, is over.
    """
    bench.batches.seed(batches[0])
    seeded = torch.get_rng_state()
    before = random.getstate(), _plain_values(bench)
    bench.alone(*batches)
    on_gpu = bench.learner.flat.buffer.is_cuda  # else chance is drawn there, as it should be
    drawn = on_gpu and not torch.equal(seeded, torch.get_rng_state())
    return not drawn and before == (random.getstate(), _plain_values(bench))


def _plain_values(bench: Bench) -> list[Any]:
    """Numbers and texts among what task and modules hold, and how many things there are."""
    found: list[Any] = []
    for place in places(bench):
        found.append(len(place))
        pairs = place.items() if isinstance(place, dict) else enumerate(place)
        found += [(key, value) for key, value in pairs if isinstance(value, _PLAIN)]
    return found


def places(bench: Bench) -> list[dict[Any, Any] | list[Any]]:
    """The attributes of the task and of each module, and the lists and dicts among them."""
    return _places(bench.task.task, *bench.learner.model.modules())


def what_others_hold(bench: Bench) -> list[Any]:
    """And may replace, so that whoever reads it at its address must hold it: a table that grows, a buffer."""
    return [bench.buffers.live(), *(place.copy() for place in places(bench))]


def tensors_of_task(bench: Bench) -> list[Tensor]:
    """Those that the task has put by."""
    found = [one for place in _places(bench.task.task) for one in _values(place)]
    return [one for one in found if isinstance(one, Tensor)]


def _values(place: dict[Any, Any] | list[Any]) -> list[Any]:
    return list(place.values()) if isinstance(place, dict) else place


def _places(*holders: Any) -> list[dict[Any, Any] | list[Any]]:
    attributes = [vars(holder) for holder in holders if hasattr(holder, "__dict__")]
    values = [value for place in attributes for value in place.values()]
    return [*attributes, *(value for value in values if type(value) is list or type(value) is dict)]
