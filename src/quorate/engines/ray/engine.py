"""The Ray engine: its settings and their checks. `RayRun` holds an open run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from quorate.checkpoint import CheckpointFolder
from quorate.engines.base import CheckpointWriter, Job
from quorate.engines.shared.real_time import LiveEngine, check_faults
from quorate.engines.shared.shared_memory import WIRES
from quorate.engines.shared.update import KEPT, KEPT_HALF
from quorate.errors import BadInput, check_at_least
from quorate.faults import Faults, parse_faults
from quorate.latency import Latency, parse_latency
from quorate.schema import MOST_THREADS, MOST_WORKERS


class Ray(LiveEngine):
    """Workers on a Ray cluster: the one at `address`, the one this process or job is connected to, or one that is
    started on this machine for the run.

    workers: number of workers. Workers for which the cluster has no room join when it has.
    address: host:port of the cluster's head; "auto" for a cluster on this machine. None: see above.
    shards: number of parts into which the model is split; None: one for each node.
    cpus, gpus, resources: resources that one worker takes of its node, in Ray's units; `resources` are custom ones.
    shard_resources: custom resources of a shard, e.g. {"stable": 1} for nodes that are not spot machines.
    runtime_env, working_dir: files and packages that Ray sends to the nodes in addition to the task.
    wait_s: seconds to wait for the cluster to have room for the quorum.
    threads: torch threads in each worker.
    device: device of the workers: "cpu" or "cuda"; None: "cuda" if they have GPUs.
    latency: artificial delay before each ticket, as a model or its text form; drawn as in the simulator.
    faults: script of worker kills, or its text form. Processes are really killed; they are replaced automatically.
    wire: format of gradients in transit: "fp32" (exact) or "bf16" (half the bytes).
    """

    name = "ray"
    keeps_checkpoints = True
    #: A shard may be lost, so checkpoints are written even if the user does not ask for them.
    may_lose_learner = True

    def __init__(
        self,
        workers: int,
        *,
        address: str | None = None,
        shards: int | None = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        shard_resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        working_dir: str | Path | None = None,
        wait_s: float = 0.0,
        threads: int = 1,
        device: str | None = None,
        latency: Latency | str | None = None,
        faults: Faults | str | None = None,
        wire: str = "fp32",
    ) -> None:
        self.workers = check_at_least("workers", workers, 1, MOST_WORKERS)
        self.address = address
        self.shards = None if shards is None else check_at_least("shards", shards, 1)
        self.cpus, self.gpus = _amount("cpus", cpus), _amount("gpus", gpus)
        self.resources = {name: _amount(f"resource {name!r}", value) for name, value in (resources or {}).items()}
        self.shard_resources = None if shard_resources is None else dict(shard_resources)
        self.runtime_env = None if runtime_env is None else dict(runtime_env)
        self.working_dir = None if working_dir is None else str(working_dir)
        if not wait_s >= 0:
            raise BadInput(f"wait_s is {wait_s}, but a time to wait cannot be negative")
        self.wait_s = wait_s
        self.threads = check_at_least("threads", threads, 1, MOST_THREADS)
        self.device = device or ("cuda" if gpus else "cpu")
        if self.device not in ("cpu", "cuda"):
            raise BadInput(f"device is {self.device!r}, but workers on Ray compute on cpu or cuda")
        if self.device == "cuda" and not gpus:
            raise BadInput("device is 'cuda', but workers get no GPU from Ray; give gpus=1 (--gpus 1)")
        self.latency = parse_latency(latency) if isinstance(latency, str) else latency
        self.faults = parse_faults(faults) if isinstance(faults, str) else faults
        check_faults(self.name, self.faults, workers)
        if wire not in WIRES:
            raise BadInput(f"wire is {wire!r}, but gradients can be stored as one of: {', '.join(WIRES)}")
        self.wire = wire

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "shards": self.shards if self._open is None else len(self._open.cut.parts),
            "cpus": self.cpus,
            "gpus": self.gpus,
            "resources": self.resources,
            "threads": self.threads,
            "device": self.device,
            "latency": None if self.latency is None else self.latency.text(),
            "faults": None if self.faults is None else self.faults.source,
            "wire": self.wire,
            "arithmetic": KEPT if self.wire == "fp32" else KEPT_HALF,
        }

    # ------------------------------------------------------------ opening and closing

    def open(self, job: Job) -> None:
        if not sys.platform.startswith("linux"):
            raise BadInput("the Ray engine needs Linux (memfd, /proc); elsewhere use the simulated engine")
        self._check_job(job)
        from quorate.engines.ray.connection import ray_module

        ray_module()
        from quorate.engines.ray.run import RayRun

        with ExitStack() as to_close:
            run = RayRun(self, job, to_close)
            run.start()
            self._open = run
            run.to_close = to_close.pop_all()

    # ------------------------------------------------------------ the model

    def evaluate(self) -> dict[str, float]:
        measures: dict[str, float] = self._run.evaluate()
        return measures

    def parameters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._run.parameters(averaged=False)
        return found

    def averaged_parameters(self) -> dict[str, Tensor] | None:
        found: dict[str, Tensor] | None = self._run.parameters(averaged=True) if self._run.has_average else None
        return found

    def digest(self) -> str | None:
        found: str = self._run.digest()
        return found

    def write_parameters(self, path: Path) -> None:
        self._run.write_parameters(path, averaged=False)

    def parameter_bytes(self) -> int:
        size: int = self._run.parameter_bytes
        return size

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._run.state()
        return state

    def restore(self, state: dict[str, Any], time: float) -> None:
        self._run.restore(state, time)

    def check_can_save(self) -> None:
        self._run.check_can_save()

    def checkpoint_writer(self, folder: CheckpointFolder, on_failure: Any) -> CheckpointWriter:
        writer: CheckpointWriter = self._run.checkpoint_writer(folder, on_failure)
        return writer

    def learner_leaves(self) -> bool:
        leaves: bool = self._run.shard_leaves()
        return leaves


def _amount(name: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise BadInput(f"{name} is {value!r}, but it must be a number from 0 up")
    return value
