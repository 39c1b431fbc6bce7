"""Asynchronous workers that read and write a net layer by layer, in virtual time.

The library's asynchronous policy moves whole versions; here every layer has a version of its own. Times come from the
library's latency models, drawn as its simulated engine draws them, and with reading at the start and writing at the end
a run is the same as `quorate.train(…, Async(), Simulated(…))`, update by update (a test holds it to that).
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol

from experiments.layers.timing import Timing
from quorate.latency import parse_latency

_READ, _WRITE = 0, 1


class Net(Protocol):
    """What is trained, layer by layer, bottom first; `NoNet` where only times are asked for."""

    def read(self, layer: int) -> Any:
        """The layer's newest parameters; never changed afterwards."""

    def gradients(self, number: int, parameters: list[Any]) -> list[Any]:
        """The gradient of every layer on the batch of this ticket, at parameters that may be of different versions."""

    def write(self, layer: int, gradient: Any) -> None:
        """Apply a gradient to a layer."""


class NoNet:
    """Only times and versions."""

    def read(self, layer: int) -> None:
        """Nothing to keep."""

    def gradients(self, number: int, parameters: list[Any]) -> list[Any]:
        """As many nothings as there are layers."""
        return parameters

    def write(self, layer: int, gradient: Any) -> None:
        """Nothing to change."""


class Applied(NamedTuple):
    """A ticket whose last gradient was applied: when, and how stale each layer's was."""

    number: int
    time_s: float
    staleness: list[int]


class _Step:
    """A worker's step under way."""

    def __init__(self, number: int, began_s: float, seconds: float, layers: int) -> None:
        self.number, self.began_s, self.seconds = number, began_s, seconds
        self.parameters: list[Any] = [None] * layers
        self.versions = [0] * layers
        self.gradients: list[Any] | None = None
        self.staleness = [0] * layers


def run_layers(timing: Timing, latency: str, workers: int, seed: int, net: Net) -> Iterator[Applied]:
    """Tickets in the order in which they end, without an end: the caller stops."""
    layers = len(timing.read)
    moments = _moments(timing)
    draw = parse_latency(latency).sampler(seed, workers)
    versions = [0] * layers
    steps: list[_Step] = []
    taken = [0] * workers  # steps so far
    started = ended = 0
    heap: list[tuple[float, int, int, int]] = []  # time, sequence, worker, place among the moments
    sequence = 0

    def begin(worker: int, now: float) -> _Step:
        nonlocal started
        seconds = draw(worker, taken[worker], ended, now)  # the row is the version, as in the simulated engine
        taken[worker] += 1
        started += 1
        return _Step(started - 1, now, seconds, layers)

    for worker in range(workers):
        steps.append(begin(worker, 0.0))
        heappush(heap, (0.0, worker, worker, 0))
    sequence = workers
    while True:
        now, _, worker, place = heappop(heap)
        step = steps[worker]
        for kind, layer in moments[place][1]:
            if kind == _READ:
                step.parameters[layer], step.versions[layer] = net.read(layer), versions[layer]
                continue
            if step.gradients is None:  # every layer has been read by then
                step.gradients = net.gradients(step.number, step.parameters)
            net.write(layer, step.gradients[layer])
            step.staleness[layer] = versions[layer] - step.versions[layer]
            versions[layer] += 1
        place += 1
        if place == len(moments):
            ended += 1
            yield Applied(step.number, now, step.staleness)
            step = steps[worker] = begin(worker, now)
            place = 0
        heappush(heap, (step.began_s + moments[place][0] * step.seconds, sequence, worker, place))
        sequence += 1


def _moments(timing: Timing) -> list[tuple[float, list[tuple[int, int]]]]:
    """What a step does when: shares of the step in order, each with the layers that are read or written then."""
    found: dict[tuple[float, int], list[tuple[int, int]]] = {}
    for layer, (read, write) in enumerate(zip(timing.read, timing.write, strict=True)):
        assert read < write <= 1, "a layer is read before its gradient is there"
        found.setdefault((read, _READ), []).append((_READ, layer))
        found.setdefault((write, _WRITE), []).append((_WRITE, layer))
    assert max(timing.read) < min(timing.write), "the loss needs every layer"
    moments = [(share, actions) for (share, _), actions in sorted(found.items())]
    assert moments[0][0] == 0 and moments[-1][0] == 1, "a step begins with a read and ends with a write"
    return moments
