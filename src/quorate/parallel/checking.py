"""Whether all processes really have the same parameters, version after version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from quorate.engines.collective.plane import Plane
from quorate.errors import QuorateError, check_at_least
from quorate.learner import digest


class Checker:
    """Tells the others a digest of every `every`-th version, and compares theirs with its own.

    The data plane's updating thread calls it after each version, when its parameters are exactly that version.
    """

    def __init__(
        self, every: int | None, named: Sequence[tuple[str, Tensor]], plane: Plane, send: Callable[..., None]
    ) -> None:
        self._every = None if every is None else check_at_least("check_every", every, 1)
        self._names = {parameter: name for name, parameter in named}
        self._plane, self._send = plane, send
        self._lock = threading.Lock()
        self._own: dict[int, str] = {}
        self._theirs: dict[int, list[tuple[int, str]]] = {}
        #: Called after each version with its number and how long it took.
        self.then: Callable[[int, float], None] | None = None
        plane.on_version = self._made

    def _made(self, version: int, seconds: float) -> None:
        if self._every is not None and version % self._every == 0:
            own = digest({self._names[one]: tensor.cpu() for one, tensor in self._plane.newest().items()})
            with self._lock:
                self._own[version] = own
                self._own.pop(version - 16 * self._every, None)
                theirs = self._theirs.pop(version, [])
            self._send("digest", version=version, digest=own)
            for worker, other in theirs:
                self._compare(version, worker, own, other)
        if self.then is not None:
            self.then(version, seconds)

    def heard(self, message: dict[str, Any]) -> None:
        """Another process's digest came."""
        version, worker, other = message["version"], message["worker"], message["digest"]
        with self._lock:
            own = self._own.get(version)
            if own is None:
                self._theirs.setdefault(version, []).append((worker, other))
        if own is not None:
            self._compare(version, worker, own, other)

    def _compare(self, version: int, worker: int, own: str, other: str) -> None:
        if own != other:
            self._plane.fail(
                QuorateError(
                    f"the parameters of process {worker} differ from those of process {self._plane.worker} at version "
                    f"{version}: something besides optimizer.step() changes them, or the optimizers differ"
                )
            )
