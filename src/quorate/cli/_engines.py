"""Where runs are made: on real workers, here or on Ray, or on simulated ones. An engine is made anew for every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quorate.cli._policies import shown
from quorate.cli._ray_options import RayOptions
from quorate.errors import BadInput, unknown_name
from quorate.faults import parse_faults
from quorate.policies import Policy

if TYPE_CHECKING:
    from quorate.engines import Engine

LOCAL, RAY, SIMULATED = "local", "ray", "simulated"


@dataclass(frozen=True, kw_only=True)
class RealWorkers:
    """What holds for workers that are processes, wherever they are."""

    real: ClassVar[bool] = True

    threads: int
    device: str | None
    latency: str | None
    faults: str | None
    wire: str | None

    def __post_init__(self) -> None:
        if self.faults is not None and parse_faults(self.faults).crash_every_s is not None:
            raise BadInput(
                f"faults {self.faults!r}: real workers are killed one by one, e.g. lose:3@2; crash: is for simulated "
                f"ones (quorate simulate, or quorate compare --engine simulated)"
            )

    def _arguments(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "latency": self.latency,
            "faults": self.faults,
            "wire": self.wire or "fp32",
        }


@dataclass(frozen=True, kw_only=True)
class Processes(RealWorkers):
    """Worker processes on this machine, in real time."""

    to_say_again: ClassVar[str] = ""

    def engine(self, workers: int, policy: Policy, model_bytes: int | None) -> Engine:
        import quorate

        assert model_bytes is None, "real workers compute gradients of a real model"
        return quorate.Local(workers, device=self.device or "cpu", **self._arguments())


@dataclass(frozen=True, kw_only=True)
class OnRay(RealWorkers):
    """Workers on a Ray cluster, in real time."""

    cluster: RayOptions

    @property
    def to_say_again(self) -> str:
        return self.cluster.to_say_again()

    def engine(self, workers: int, policy: Policy, model_bytes: int | None) -> Engine:
        import quorate

        assert model_bytes is None, "real workers compute gradients of a real model"
        return quorate.Ray(workers, device=self.device, **self._arguments(), **self.cluster.arguments())


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Simulated workers, in virtual time."""

    real: ClassVar[bool] = False
    to_say_again: ClassVar[str] = ""

    latency: str
    network: str | None
    faults: str | None
    device: str | None
    together: bool | None

    def engine(self, workers: int, policy: Policy, model_bytes: int | None) -> Engine:
        import quorate

        return quorate.Simulated(
            workers,
            self.latency,
            network=self.network,
            faults=self.faults,
            device=self.device or "cpu",
            together=self.together,
            model_bytes=model_bytes,
        )


Place = Processes | OnRay | Simulation


def place_of_real_workers(engine: str, cluster: RayOptions, **arguments: Any) -> Processes | OnRay:
    """Here or on Ray. What only Ray knows is refused here rather than left unheeded."""
    if engine == RAY:
        return OnRay(cluster=cluster, **arguments)
    cluster.refuse()
    return Processes(**arguments)


def check_engine(engine: str, known: tuple[str, ...]) -> None:
    """Refuse a name that the command does not know."""
    if engine == SIMULATED and engine not in known:
        raise BadInput(f"{shown('engine', engine)} was given, but these workers are real; type: quorate simulate")
    if engine not in known:
        raise unknown_name("engine", engine, known)
