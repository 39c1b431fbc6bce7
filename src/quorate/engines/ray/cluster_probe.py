"""Asks a Ray cluster for its versions and nodes: `python cluster_probe.py HOST:PORT` prints one line of JSON.

It runs as a separate process because Ray's client waits 40 s for a server that is not Ray and cannot be interrupted;
a process can be killed. It is run by its path and imports nothing of quorate.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_TIMEOUT_S = 5.0  # for each request


def ask(address: str) -> dict[str, Any]:
    """Describe the cluster. The first request has no token, which shows whether the cluster requires one."""
    from ray._raylet import Config, GcsClient

    mode = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    Config.initialize("")
    takes_anyone = True
    try:
        client = GcsClient(address=address)
    except Exception as error:
        if type(error).__name__ != "AuthenticationError":
            raise
        takes_anyone = False
        del os.environ["RAY_AUTH_MODE"]
        if mode is not None:
            os.environ["RAY_AUTH_MODE"] = mode
        Config.initialize("")
        client = GcsClient(address=address)
    versions = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=_TIMEOUT_S))
    dashboard = client.internal_kv_get(b"dashboard", namespace=b"dashboard", timeout=_TIMEOUT_S)
    return {
        "takes_anyone": takes_anyone,
        "ray": versions["ray_version"],
        "python": versions["python_version"],
        "dashboard": dashboard.decode() if dashboard else "",
        "nodes": [
            {
                "address": info.node_manager_address,
                "socket": info.raylet_socket_name,
                "is_head": bool(info.is_head_node),
            }
            for info in client.get_all_node_info(timeout=_TIMEOUT_S).values()
            if info.state == 0  # alive
        ],
    }


def main() -> None:
    try:
        found = ask(sys.argv[1])
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a normal exit would wait for Ray's threads, which may still wait for a reply


if __name__ == "__main__":
    main()
