"""One process of a run, for tests that kill it: `control_process hub|link STORE WORKERS WORKER`.

It says "ready" when it has connected, and goes on until its input ends.
"""

from __future__ import annotations

import sys

from torch.distributed import FileStore

from quorate.data_parallel.control import Hub, Link


def main(role: str, path: str, workers: int, worker: int) -> None:
    store = FileStore(path, -1)
    if role == "hub":
        hub = Hub(workers)
        hub.publish(store)
    link = Link(worker, store, lambda message: None, lambda error: print(error, flush=True))  # noqa: T201
    print("ready", flush=True)  # noqa: T201
    sys.stdin.read()
    link.send("finished")
    link.close()
    if role == "hub":
        hub.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
