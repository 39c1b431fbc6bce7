"""Whether the nodes have the same quorate as the run."""

from __future__ import annotations

import sys
from typing import Any

from quorate.engines.ray.cluster import INSTALL, Cluster
from quorate.engines.ray.shipping import VERSION
from quorate.errors import BadInput

#: A node that has not answered by then is busy starting; its workers will say what they miss.
_ANSWER_WITHIN_S = 30.0


def check_software(cluster: Cluster) -> None:
    """BadInput when a node beside this one lacks quorate or torch, or has another quorate."""
    import ray
    from ray import cloudpickle
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    others = [node for node in cluster.nodes() if node.id != cluster.driver_node and node.draining_by_s is None]
    if not others:
        return
    # With its code: a node without quorate could not import it by its name.
    this_module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(this_module)
    try:
        look = ray.remote(num_cpus=0, max_retries=0)(installed)
        answers = {}
        for node in others:
            only_there = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
            answers[look.options(scheduling_strategy=only_there, name="quorate:look").remote()] = node.address
    finally:
        cloudpickle.unregister_pickle_by_value(this_module)
    ready, late = ray.wait(list(answers), num_returns=len(answers), timeout=_ANSWER_WITHIN_S)
    for reference in late:
        ray.cancel(reference, force=True)
    for reference in ready:
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError:
            continue  # the node has gone meanwhile, which is the run's daily bread
        check_installed(answers[reference], found)


def installed() -> dict[str, Any]:
    """What this node has; runs where quorate may be missing, so it must not import it."""
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    found: dict[str, Any] = {"quorate": None, "torch": find_spec("torch") is not None}
    if find_spec("quorate") is not None:
        try:
            found["quorate"] = version("quorate")
        except PackageNotFoundError:
            found["quorate"] = "of unknown version"
    return found


def check_installed(address: str, found: dict[str, Any]) -> None:
    if found["quorate"] is None or not found["torch"]:
        lacking = "quorate" if found["quorate"] is None else "torch"
        raise BadInput(
            f"node {address} does not have {lacking}; install the run's quorate {VERSION} on every node "
            f"({INSTALL}), or let Ray do it with runtime_env={{'pip': ['quorate[ray]=={VERSION}']}}"
        )
    if found["quorate"] != VERSION:
        raise BadInput(
            f"node {address} has quorate {found['quorate']}, but the run is of quorate {VERSION}; install the same on "
            f"every node, or let Ray do it with runtime_env={{'pip': ['quorate[ray]=={VERSION}']}}"
        )
