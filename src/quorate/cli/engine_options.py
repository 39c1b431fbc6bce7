"""From options to an engine: local processes, Ray or simulated workers. Every run gets a new engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from quorate.cli.policy_options import flag_text
from quorate.cli.ray_options import RayOptions
from quorate.errors import BadInput, unknown_name
from quorate.faults import parse_faults

if TYPE_CHECKING:
    from quorate.engines import Engine


LOCAL, RAY, SIMULATED = "local", "ray", "simulated"


@dataclass(frozen=True, kw_only=True)
class RealWorkers:
    """Options of workers that are processes, on this machine or on Ray."""

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
        return {"threads": self.threads, "latency": self.latency, "faults": self.faults, "wire": self.wire or "fp32"}


@dataclass(frozen=True, kw_only=True)
class LocalPlace(RealWorkers):
    """Worker processes on this machine, in real time."""

    options_to_repeat: ClassVar[str] = ""

    def engine(self, workers: int, model_bytes: int | None) -> Engine:
        import quorate

        assert model_bytes is None, "real workers compute gradients of a real model"
        return quorate.Local(workers, device=self.device or "cpu", **self._arguments())


@dataclass(frozen=True, kw_only=True)
class RayPlace(RealWorkers):
    """Workers on a Ray cluster, in real time."""

    cluster: RayOptions

    @property
    def options_to_repeat(self) -> str:
        return self.cluster.options_to_repeat()

    def engine(self, workers: int, model_bytes: int | None) -> Engine:
        import quorate

        assert model_bytes is None, "real workers compute gradients of a real model"
        return quorate.Ray(workers, device=self.device, **self._arguments(), **self.cluster.arguments())


@dataclass(frozen=True, kw_only=True)
class SimulatedPlace:
    """Simulated workers, in virtual time."""

    real: ClassVar[bool] = False
    options_to_repeat: ClassVar[str] = ""

    latency: str
    network: str | None
    faults: str | None
    device: str | None
    together: bool | None

    def engine(self, workers: int, model_bytes: int | None) -> Engine:
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


Place = LocalPlace | RayPlace | SimulatedPlace


def place_of_real_workers(engine: str, cluster: RayOptions, **arguments: Any) -> LocalPlace | RayPlace:
    """Local or Ray workers. For local workers, options of Ray are refused instead of ignored."""
    arguments["latency"] = None if arguments["latency"] == "none" else arguments["latency"]
    if engine == RAY:
        return RayPlace(cluster=cluster, **arguments)
    cluster.refuse()
    return LocalPlace(**arguments)


def check_engine(engine: str, known: tuple[str, ...]) -> None:
    """Refuse an engine that the command does not have."""
    if engine == SIMULATED and engine not in known:
        raise BadInput(f"{flag_text('engine', engine)} was given, but these workers are real; type: quorate simulate")
    if engine not in known:
        raise unknown_name("engine", engine, known)
