"""The actors of a run: placement, names, and calls with retry."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quorate.engines.ray.cluster import Cluster, Demand
from quorate.engines.ray.evaluator import Evaluator
from quorate.engines.ray.shard import SHARD_GROUPS, Shard
from quorate.engines.ray.transport import ActorConfig
from quorate.engines.ray.worker import GROUPS, WorkerActor
from quorate.errors import LearnerLost, WorkerFailed

#: Ray's errors for an actor, object, node or process that is lost.
_LOSSES = (RayActorError, ObjectLostError, NodeDiedError, WorkerCrashedError, ActorUnschedulableError)
_TRIES = 3
#: Ray must not restart actors: for a lost actor, the engine makes a new one.
_NO_RESTART = {"max_restarts": 0, "max_task_retries": 0}


def ask(whose: str, call: Callable[[], Any], is_gone: Callable[[], bool] = lambda: False) -> Any:
    """The result of one actor call, with the retries and errors of `ask_all`."""
    return ask_all(whose, [call], is_gone)[0]


def ask_all(whose: str, calls: Sequence[Callable[[], Any]], is_gone: Callable[[], bool] = lambda: False) -> list[Any]:
    """The results of concurrent actor calls. Retries if Ray cannot tell whether the calls were executed.

    is_gone: whether the actors are lost for good, so that a retry is useless.
    """
    pending = [call() for call in calls]
    for tried in range(_TRIES):
        try:
            return list(ray.get(pending))
        except ActorUnavailableError as error:
            if tried + 1 == _TRIES or is_gone():
                raise LearnerLost(f"{whose} cannot be reached") from error
            pending = [call() for call in calls]
        except RayActorError as error:
            raise LearnerLost(f"{whose} is gone") from error
        except RayError as error:
            cause = original(error)
            if isinstance(cause, RayTaskError) and not isinstance(cause.cause, _LOSSES):
                # The actor's exception could not be pickled.
                raise WorkerFailed(f"{whose} failed:\n{error}") from error
            if not isinstance(cause, RayError):
                raise cause from error
            # The actor's node died before the call started, or an object that the call needs was lost.
            raise LearnerLost(f"{whose} is gone") from error
    raise AssertionError


def original(error: BaseException) -> BaseException:
    """The exception that the actor's code raised, with Ray's text as a note; `error` itself if Ray failed."""
    cause: Any = error.cause if isinstance(error, RayTaskError) else None
    if not isinstance(cause, Exception) or isinstance(cause, RayError):
        return error
    cause.add_note(str(error))
    return cause


class Actors:
    """Creates actors. Their names in Ray's dashboard show the run, the role, and how often the actor was replaced."""

    def __init__(
        self,
        cluster: Cluster,
        payload: Any,
        config: ActorConfig,
        demand: Demand,
        shard_resources: dict[str, float] | None,
    ) -> None:
        self._cluster, self._payload, self._config, self._demand = cluster, payload, config, demand
        self._shard_resources = shard_resources
        self._run = secrets.token_hex(2)
        self._lives: dict[str, int] = {}  # role -> actors made for it
        self.gone: set[str] = set()  # nodes that do not answer any more
        self._worker = ray.remote(concurrency_groups=GROUPS, **_NO_RESTART)(WorkerActor)
        self._shard = ray.remote(concurrency_groups=SHARD_GROUPS, allow_out_of_order_execution=True, **_NO_RESTART)(
            Shard
        )
        self._evaluator = ray.remote(**_NO_RESTART)(Evaluator)

    def _name(self, role: str) -> str:
        life = self._lives[role] = self._lives.get(role, 0) + 1
        return f"quorate-{self._run} {role}" + (f", life {life}" if life > 1 else "")

    def worker(self, number: int) -> Any:
        """A worker on any node with free resources; if there is none, the actor waits for one."""
        return self._worker.options(
            name=self._name(f"worker {number}"),
            num_cpus=self._demand.cpus,
            num_gpus=self._demand.gpus,
            resources=self._demand.resources,
            scheduling_strategy="SPREAD",
            label_selector=self._avoid_lost_nodes(),
        ).remote(self._payload, self._config, number)

    def _avoid_lost_nodes(self) -> dict[str, str]:
        """Exclude lost nodes: Ray notices a loss some 15 s later than we do, and would place workers there."""
        self.gone &= {node.id for node in self._cluster.nodes()}  # Ray excludes the others itself by now
        return {"ray.io/node-id": f"!in({','.join(sorted(self.gone))})"} if self.gone else {}

    def evaluator(self) -> Any:
        """The evaluator, on the driver's node."""
        return self._evaluator.options(name=self._name("evaluator"), **self._on(self._cluster.driver_node)).remote(
            self._payload, self._config
        )

    def shards(self, count: int | None) -> list[Any]:
        """`count` shards, or one on each node. The driver's node is first: the run would end with that node anyway."""
        if self._shard_resources is not None:
            # Ray chooses the nodes by the resources.
            spread = {"num_cpus": 0, "resources": self._shard_resources, "scheduling_strategy": "SPREAD"}
            return [self._one_shard(number, spread) for number in range(count or 1)]
        staying = [node.id for node in self._cluster.nodes() if node.draining_by_s is None]
        nodes = sorted(staying, key=lambda node: node != self._cluster.driver_node)
        return [self._one_shard(number, self._on(nodes[number % len(nodes)])) for number in range(count or len(nodes))]

    def spare_shard(self) -> Any:
        """A shard on the driver's node that can replace a lost one."""
        return self._one_shard("spare", self._on(self._cluster.driver_node))

    def _one_shard(self, which: int | str, options: dict[str, Any]) -> Any:
        return self._shard.options(name=self._name(f"shard {which}"), **options).remote(self._payload, self._config)

    def _on(self, node: str) -> dict[str, Any]:
        """Options that place an actor on this node without reserving a CPU."""
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False)}


def end(actor: Any) -> None:
    """Kill an actor, which may be gone already."""
    if actor is not None:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)


def which_answer(actors: Sequence[Any], wait_s: float) -> list[bool]:
    """Which actors answer a ping within `wait_s`."""
    pings = [actor.ping.remote() for actor in actors]
    ray.wait(pings, num_returns=len(pings), timeout=wait_s)
    return [_has_answered(ping) for ping in pings]


def _has_answered(ping: Any) -> bool:
    try:
        ray.get(ping, timeout=0)
    except RayError:
        return False
    return True
