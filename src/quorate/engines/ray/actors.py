"""The actors of a run: where they are placed, what they are called, and which of them stand in for others."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quorate.engines.ray.cluster import Cluster, Demand
from quorate.engines.ray.keeper import Keeper
from quorate.engines.ray.setting import Setting
from quorate.engines.ray.shard import SHARD_GROUPS, Shard
from quorate.engines.ray.worker import GROUPS, Worker

_NEVER_AGAIN = {"max_restarts": 0, "max_task_retries": 0}  # a new life is a new actor, which we make ourselves


class Actors:
    """Makes actors. Their names in Ray's dashboard tell the run, the role and the life."""

    def __init__(
        self, cluster: Cluster, parcel: Any, setting: Setting, demand: Demand, shard_resources: dict[str, float] | None
    ) -> None:
        self._cluster, self._parcel, self._setting, self._demand = cluster, parcel, setting, demand
        self._shard_resources = shard_resources
        self._run = secrets.token_hex(2)
        self._lives: dict[str, int] = {}
        self.gone: set[str] = set()  # nodes that do not answer any more
        self._worker = ray.remote(concurrency_groups=GROUPS, **_NEVER_AGAIN)(Worker)
        self._shard = ray.remote(concurrency_groups=SHARD_GROUPS, allow_out_of_order_execution=True, **_NEVER_AGAIN)(
            Shard
        )
        self._keeper = ray.remote(**_NEVER_AGAIN)(Keeper)

    def _name(self, role: str) -> str:
        life = self._lives.get(role, 0)
        self._lives[role] = life + 1
        return f"quorate-{self._run} {role}" + (f", life {life + 1}" if life else "")

    def worker(self, number: int) -> Any:
        """It is put where there is room; where there is none, it waits for some."""
        return self._worker.options(
            name=self._name(f"worker {number}"),
            num_cpus=self._demand.cpus,
            num_gpus=self._demand.gpus,
            resources=self._demand.resources,
            scheduling_strategy="SPREAD",
            label_selector=self._elsewhere(),
        ).remote(self._parcel, self._setting, number)

    def _elsewhere(self) -> dict[str, str]:
        """Not on nodes that are gone: Ray notices some 15 s later than we do, and would send new workers there."""
        alive = {node.id for node in self._cluster.nodes()}
        self.gone &= alive  # Ray knows by now
        return {"ray.io/node-id": f"!in({','.join(sorted(self.gone))})"} if self.gone else {}

    def keeper(self) -> Any:
        return self._keeper.options(
            name=self._name("keeper"), num_cpus=0, scheduling_strategy=self._on(self._cluster.driver_node)
        ).remote(self._parcel, self._setting)

    def shards(self, count: int | None) -> list[Any]:
        """So many shards, or one a node; the driver's node comes first, which the run cannot lose."""
        if self._shard_resources is not None:  # where Ray finds these, one by one
            spread = {"num_cpus": 0, "resources": self._shard_resources, "scheduling_strategy": "SPREAD"}
            return [self._one_shard(number, **spread) for number in range(count or 1)]
        staying = [node.id for node in self._cluster.nodes() if node.draining_by_s is None]
        nodes = sorted(staying, key=lambda node: node != self._cluster.driver_node)
        return [self._shard_on(number, nodes[number % len(nodes)]) for number in range(count or len(nodes))]

    def spare_shard(self) -> Any:
        """One on the driver's node, to stand in for one that is lost."""
        return self._one_shard("spare", num_cpus=0, scheduling_strategy=self._on(self._cluster.driver_node))

    def _shard_on(self, number: int, node: str) -> Any:
        return self._one_shard(number, num_cpus=0, scheduling_strategy=self._on(node))

    def _one_shard(self, which: int | str, **options: Any) -> Any:
        return self._shard.options(name=self._name(f"shard {which}"), **options).remote(self._parcel, self._setting)

    def _on(self, node: str) -> Any:
        return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def end(actor: Any) -> None:
    """End an actor, wherever it is and whatever it does."""
    if actor is not None:
        with contextlib.suppress(Exception):
            ray.kill(actor, no_restart=True)


def who_is_there(actors: Sequence[Any], wait_s: float) -> list[bool]:
    """Which actors answer, before so long."""
    pings = [actor.ping.remote() for actor in actors]
    ray.wait(pings, num_returns=len(pings), timeout=wait_s)
    return [_has_come(ping) for ping in pings]


def _has_come(reference: Any) -> bool:
    try:
        ray.get(reference, timeout=0)
    except RayError:
        return False
    return True
