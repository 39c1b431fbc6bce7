"""Where runs are made: on real worker processes or on simulated ones. An engine is made anew for every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from quorate.errors import BadInput
from quorate.faults import parse_faults
from quorate.policies import Policy

if TYPE_CHECKING:
    from quorate.engines import Engine


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Worker processes on this machine, in real time."""

    real: ClassVar[bool] = True

    threads: int
    device: str
    latency: str | None
    faults: str | None
    wire: str | None

    def __post_init__(self) -> None:
        if self.faults is not None and parse_faults(self.faults).crash_every_s is not None:
            raise BadInput(
                f"faults {self.faults!r}: real workers are killed one by one, e.g. lose:3@2; crash: is for simulated "
                f"ones (quorate simulate, or quorate compare --engine simulated)"
            )

    def engine(self, workers: int, policy: Policy, model_bytes: int | None) -> Engine:
        import quorate

        assert model_bytes is None, "real workers compute gradients of a real model"
        return quorate.Local(
            workers,
            threads=self.threads,
            device=self.device,
            latency=self.latency,
            faults=self.faults,
            wire=self.wire or "fp32",
        )


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Simulated workers, in virtual time."""

    real: ClassVar[bool] = False

    latency: str
    network: str | None
    faults: str | None
    device: str | None
    together: bool | None
    #: In a comparison `together` is for those policies that can; a single run that cannot is refused.
    only_where_it_can: bool = False

    def engine(self, workers: int, policy: Policy, model_bytes: int | None) -> Engine:
        import quorate

        together = self.together
        if self.only_where_it_can and not _updates_of_one_version(policy, workers):
            together = None
        return quorate.Simulated(
            workers,
            self.latency,
            network=self.network,
            faults=self.faults,
            device=self.device or "cpu",
            together=together,
            model_bytes=model_bytes,
        )


def _updates_of_one_version(policy: Policy, workers: int) -> bool:
    return policy.begin(workers).staleness_bound == 0 and not getattr(policy, "staleness_weights", False)
