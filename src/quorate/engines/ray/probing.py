"""Asks a Ray cluster who it is, in a process of its own: `python probing.py HOST:PORT` prints one line of JSON.

Ray's client waits 40 s for something that is not Ray, and cannot be interrupted meanwhile. A process can be ended by
whoever asks. The file stands alone, so that it can be run by its path and imports nothing of quorate.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_SECONDS = 5.0  # for one question


def ask(address: str) -> dict[str, Any]:
    """What the cluster at this address says of itself; first without a token, which shows whether anybody may ask."""
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
    versions = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=_SECONDS))
    dashboard = client.internal_kv_get(b"dashboard", namespace=b"dashboard", timeout=_SECONDS)
    return {
        "takes_anyone": takes_anyone,
        "ray": versions["ray_version"],
        "python": versions["python_version"],
        "dashboard": dashboard.decode() if dashboard else "",
        "nodes": [_node(info) for info in client.get_all_node_info(timeout=_SECONDS).values() if info.state == 0],
    }


def _node(info: Any) -> dict[str, Any]:
    return {
        "address": info.node_manager_address,
        "socket": info.raylet_socket_name,
        "is_head": bool(info.is_head_node),
    }


def main() -> None:
    try:
        found = ask(sys.argv[1])
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error)}
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Ray's threads may still wait for somebody who does not answer


if __name__ == "__main__":
    main()
