"""From options to an engine: local processes, Ray or simulated workers. Every run gets a new engine."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from quorate.cli.options import (
    DEFAULT_LATENCY,
    LOCAL,
    RAY,
    SIMULATED,
    ClusterOptions,
    EngineOptions,
    TaskOptions,
    UpdateOptions,
    option,
)
from quorate.cli.policy_options import flag_text
from quorate.errors import BadInput, unknown_name
from quorate.faults import parse_faults

if TYPE_CHECKING:
    from quorate.engines import Engine

# ---------------------------------------------------------------- the Ray cluster

RAY_CLUSTER = "The Ray cluster (--engine ray)"
#: Option -> argument, for options that are not recorded, because they may differ each time a run is resumed.
UNRECORDED = {
    "address": "address",
    "shard_resources": "shard_resources",
    "working_dir": "working_dir",
    "runtime_env": "runtime_env",
    "wait": "wait_s",
}


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The cluster, and the resources of workers and shards."""

    address: Annotated[
        str | None,
        option(
            RAY_CLUSTER,
            "The cluster's head, or auto for one on this machine.",
            show_default="the Ray job's, or one is started",
            metavar="HOST:PORT",
        ),
    ] = None
    shards: Annotated[
        int | None,
        option(RAY_CLUSTER, "Parts of the model, each held by an actor of its own.", show_default="one a node"),
    ] = None
    cpus: Annotated[float | None, option(RAY_CLUSTER, "CPUs of a worker.", show_default="1", metavar="X")] = None
    gpus: Annotated[
        float | None, option(RAY_CLUSTER, "GPUs of a worker; 0.5: two share one.", show_default="0", metavar="X")
    ] = None
    resources: Annotated[
        str | None,
        option(RAY_CLUSTER, "Further resources of a worker.", show_default="nothing", metavar="NAME=AMOUNT,…"),
    ] = None
    shard_resources: Annotated[
        str | None,
        option(
            RAY_CLUSTER,
            "Resources of a shard, e.g. stable=1 for nodes that stay.",
            show_default="nothing",
            metavar="NAME=AMOUNT,…",
        ),
    ] = None
    working_dir: Annotated[
        str | None, option(RAY_CLUSTER, "A folder that every node gets, for the task's files.", metavar="FOLDER")
    ] = None
    runtime_env: Annotated[
        str | None,
        option(RAY_CLUSTER, "Ray's runtime environment of the nodes, e.g. pip packages.", metavar="FILE.json|JSON"),
    ] = None
    wait: Annotated[
        float | None,
        option(
            RAY_CLUSTER,
            "Seconds to wait for the cluster to have room for the quorum.",
            show_default="0",
            metavar="SECONDS",
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """The options that the user gave, as typed."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def arguments(self) -> dict[str, Any]:
        """The arguments for `quorate.Ray`."""
        read: dict[str, Any] = {
            "resources": lambda text: parse_resources("resources", text),
            "shard_resources": lambda text: parse_resources("shard_resources", text),
            "runtime_env": parse_runtime_env,
        }
        given = {name: read[name](value) if name in read else value for name, value in self.given().items()}
        return {UNRECORDED.get(name, name): value for name, value in given.items()}

    def unrecorded_arguments(self) -> dict[str, Any]:
        """The arguments that a header does not hold."""
        return {name: value for name, value in self.arguments().items() if name in UNRECORDED.values()}

    def options_to_repeat(self) -> str:
        """Options that the resume command must repeat, each with a leading space."""
        again = {name: value for name, value in self.given().items() if name in UNRECORDED}
        return "".join(f" --{name.replace('_', '-')} {shlex.quote(f'{again[name]}')}" for name in again)


def parse_resources(name: str, text: str) -> dict[str, float]:
    """Read `stable=1,disk=0.5`."""
    found: dict[str, float] = {}
    for part in text.split(","):
        key, _, amount = (piece.strip() for piece in part.partition("="))
        try:
            found[key] = float(amount)
        except ValueError:
            key = ""
        if not key or not 0 < found[key] < float("inf"):
            raise BadInput(
                f"{name} is {text!r}, but it must be NAME=AMOUNT, with a comma between two and amounts above 0, "
                f"e.g. stable=1,disk=0.5"
            )
        if key in ("CPU", "GPU"):
            raise BadInput(f"{name} is {text!r}, but {key} has an option of its own; give --{key.lower()}s")
    return found


def resources_text(resources: dict[str, float]) -> str | None:
    """The text that `parse_resources` reads; None if there are no resources."""
    return ",".join(f"{name}={amount:g}" for name, amount in resources.items()) or None


def parse_runtime_env(text: str) -> dict[str, Any]:
    """Read Ray's runtime_env from a JSON file or from JSON text."""
    inline = text.lstrip().startswith(("{", "["))
    if not inline and not Path(text).is_file():
        raise BadInput(
            f"runtime_env is {text!r}, but there is no such file; give a JSON file, or JSON itself as in "
            """--runtime-env '{"pip": ["einops"]}'"""
        )
    try:
        found = json.loads(text if inline else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"runtime_env is {text!r}, which cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"""runtime_env is {text!r}, but it must be a JSON object, e.g. {{"pip": ["einops"]}}""")
    return found


# ---------------------------------------------------------------- places


@dataclass(frozen=True)
class Place:
    """Where the workers of a command's runs are; every run gets a new engine."""

    name: str
    options: dict[str, Any]  # arguments of the engine, without the number of workers
    options_to_repeat: str = ""  # options that the resume command must repeat

    @property
    def real(self) -> bool:
        return self.name != SIMULATED

    def engine(self, workers: int, model_bytes: int | None) -> Engine:
        import quorate

        if self.name == SIMULATED:
            return quorate.Simulated(workers, **self.options, model_bytes=model_bytes)
        assert model_bytes is None, "real workers compute gradients of a real model"
        return (quorate.Ray if self.name == RAY else quorate.Local)(workers, **self.options)


def choose_place(
    engine: EngineOptions,
    cluster: ClusterOptions,
    on_ray: RayOptions,
    subject: TaskOptions,
    update: UpdateOptions,
    delays: str | None = None,
) -> Place:
    """The chosen engine. Options of other engines are refused instead of ignored.

    delays: latency of local workers, unless one is given.
    """
    if engine.engine not in (LOCAL, RAY, SIMULATED):
        raise unknown_name("engine", engine.engine, (LOCAL, RAY, SIMULATED))
    if engine.engine != RAY:
        for name, value in on_ray.given().items():
            raise BadInput(f"{flag_text(name, value)} was given, but it is for Ray; leave it out, or add --engine ray")
    if engine.engine == SIMULATED:
        _refuse({"wire": engine.wire}, "simulated gradients are not sent anywhere", "--engine local")
        return Place(
            SIMULATED,
            {
                "latency": cluster.latency or DEFAULT_LATENCY,
                "network": cluster.network,
                "faults": cluster.faults,
                "device": update.device or "cpu",
                "together": update.together,
            },
        )
    not_real = {
        "network": cluster.network,
        "no_gradients": subject.no_gradients or None,
        "together": update.together or None,
        "apart": True if update.together is False else None,
    }
    _refuse(not_real, f"the {engine.engine} engine's workers are real", "--engine simulated")
    if cluster.faults is not None and parse_faults(cluster.faults).crash_every_s is not None:
        raise BadInput(
            f"faults {cluster.faults!r}: real workers are killed one by one, e.g. lose:3@2; crash: is for simulated "
            f"ones (--engine simulated)"
        )
    latency = cluster.latency or (delays if engine.engine == LOCAL else None)
    options = {
        "threads": cluster.threads,
        "latency": None if latency == "none" else latency,
        "faults": cluster.faults,
        "wire": engine.wire or "fp32",
    }
    if engine.engine == LOCAL:
        return Place(LOCAL, {**options, "device": update.device or "cpu"})
    return Place(RAY, {**options, "device": update.device, **on_ray.arguments()}, on_ray.options_to_repeat())


def _refuse(options: dict[str, Any], why: str, other_engine: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise BadInput(f"{flag_text(name, value)} was given, but {why}; leave it out, or add {other_engine}")
