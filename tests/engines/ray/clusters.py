"""Clusters for tests: one node, or several on this machine, of which some may be killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quorate.engines.ray.cluster import Demand
from quorate.engines.ray.connection import connect
from quorate.engines.ray.session import loopback_only, untouched_signals

_NO_DASHBOARD: dict[str, Any] = {"include_dashboard": False}


@contextlib.contextmanager
def one_node(cpus: int) -> Iterator[None]:
    """A Ray of our own, to which runs of this process connect."""
    opened = connect(address=None, workers=cpus, demand=Demand(1.0, 0.0, {}))
    try:
        yield
    finally:
        opened.close()


class SeveralNodes:
    """Nodes on this machine. Runs of this process connect to them; the driver is on the head, which has no CPUs."""

    def __init__(self, nodes: int, cpus: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._before = dict(os.environ)
        self._cpus = cpus
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_enable_worker_prestart"] = "0"  # noqa: SIM112 - this machine must start all nodes of the cluster
        with _short_temporary_folder(), loopback_only(True):
            self._cluster = Cluster(
                initialize_head=True,
                shutdown_at_exit=False,  # nodes are added by threads, which may not set handlers of signals
                head_node_args={"num_cpus": 0, "node_ip_address": "127.0.0.1", **_NO_DASHBOARD},
            )
        self.nodes: list[Any] = []
        for _ in range(nodes):
            self.add()
        with loopback_only(True), untouched_signals():
            ray.init(address=self._cluster.address, logging_level=logging.ERROR, log_to_driver=False)

    def add(self) -> Any:
        """One more node."""
        with loopback_only(True):
            node = self._cluster.add_node(
                num_cpus=self._cpus, node_ip_address="127.0.0.1", object_store_memory=200 << 20
            )
        self.nodes.append(node)
        return node

    def kill(self, which: int) -> None:
        """A node and all its processes end at once, without a word."""
        node = self.nodes.pop(which)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()
        for name in set(os.environ) - set(self._before):
            del os.environ[name]
        os.environ.update(self._before)


@contextlib.contextmanager
def several_nodes(nodes: int, cpus: int) -> Iterator[SeveralNodes]:
    opened = SeveralNodes(nodes, cpus)
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def _short_temporary_folder() -> Iterator[None]:
    """Ray puts sockets there, whose paths may not be long."""
    before = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = None
    os.environ.pop("TMPDIR", None)
    try:
        yield
    finally:
        tempfile.tempdir = before[0]
        if before[1] is not None:
            os.environ["TMPDIR"] = before[1]


def end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
