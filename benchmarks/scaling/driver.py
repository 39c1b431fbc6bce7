"""python -m benchmarks.scaling.driver: CPU that a Ray driver spends on a call of an actor, by how many calls are open.

The calls do nothing and eight actors answer them all, so this is the driver's own part: sending a call, waiting with
`ray.wait` over all open ones, taking the answer. What the Ray engine sends besides comes on top.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

ACTORS, CALLS, REPEATS = 8, 4000, 5


def one_by_one(ray: Any, call: Callable[[int], Any], open_calls: int) -> float:
    """CPU seconds a call where each wait gives one answer."""
    return _spent(ray, call, open_calls, lambda refs: ray.wait(refs, num_returns=1))


def many_at_once(ray: Any, call: Callable[[int], Any], open_calls: int) -> float:
    """CPU seconds a call where each wait gives all answers that are there."""

    def wait(refs: list[Any]) -> Any:
        ray.wait(refs, num_returns=1)
        return ray.wait(refs, num_returns=len(refs), timeout=0)

    return _spent(ray, call, open_calls, wait)


def _spent(ray: Any, call: Callable[[int], Any], open_calls: int, wait: Callable[[list[Any]], Any]) -> float:
    refs = [call(number) for number in range(open_calls)]
    done, start = 0, time.process_time()
    while done < CALLS:
        ready, refs = wait(refs)
        ray.get(ready)
        refs += [call(done + place) for place in range(len(ready))]
        done += len(ready)
    spent = time.process_time() - start
    ray.get(refs)
    return spent / done


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    class Echo:
        def step(self, number: int) -> int:
            return number

    with tempfile.TemporaryDirectory(prefix="q-") as folder:  # short: Ray's sockets lie in it
        ray.init(
            num_cpus=ACTORS,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            actors = [ray.remote(Echo).remote() for _ in range(ACTORS)]

            def call(number: int) -> Any:
                return actors[number % ACTORS].step.remote(number)

            ray.get([call(number) for number in range(ACTORS)])
            ways = {"one by one": one_by_one, "all that are there": many_at_once}
            found: dict[tuple[str, int], list[float]] = {(way, size): [] for way in ways for size in (8, 100, 1000)}
            for _ in range(REPEATS):
                for (way, size), spent in found.items():
                    spent.append(ways[way](ray, call, size))
            for (way, size), spent in found.items():
                low, middle, high = (1e3 * value for value in (min(spent), median(spent), max(spent)))
                print(f"{way:20}{size:6,} open {middle:8.2f} ms a call ({low:.2f} to {high:.2f})")
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
