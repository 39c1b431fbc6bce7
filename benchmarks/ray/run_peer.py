"""The first-N parameter server as Ray's documentation would have one write it: an actor for the parameters, actors
for the workers, `ray.wait` for the first gradients of a round.

Gradients and weights are objects in Ray's store. A late gradient is thrown away; its worker gets the current round's
task when it has returned, so that two tasks never queue on a worker; nothing can be cancelled while it runs.

python -m benchmarks.ray.run_peer --size 5M --case b --workers 8 --quorum 6
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from benchmarks.local import workload
from benchmarks.local.measuring import Setting
from benchmarks.ray.roles import MeterOfRoles

OBJECT_STORE_BYTES = 6 << 30

Arrays = list[NDArray[np.float32]]


class ParameterServer:
    """Has the parameters and steps the optimizer."""

    def __init__(self, size: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(workload.SEED)
        self._model = workload.model(size)
        self._optimizer = workload.optimizer(self._model)

    def apply_gradients(self, *gradients: Arrays) -> dict[str, NDArray[np.float32]]:
        summed = [np.stack(of_one_tensor).sum(axis=0) for of_one_tensor in zip(*gradients, strict=True)]
        for gradient, parameter in zip(summed, self._model.parameters(), strict=True):
            parameter.grad = torch.from_numpy(gradient / len(gradients))
        self._optimizer.step()
        return self.get_weights()

    def get_weights(self) -> dict[str, NDArray[np.float32]]:
        return {name: tensor.numpy() for name, tensor in self._model.state_dict().items()}


class Worker:
    """Sleeps, then computes the gradient of its next batch."""

    def __init__(self, size: str, case: str, number: int, steps: int) -> None:
        self._worker = workload.Worker(size, case, number, steps)

    def ready(self) -> bool:
        return True

    def compute_gradients(self, weights: dict[str, NDArray[np.float32]]) -> Arrays:
        with torch.no_grad():
            for name, parameter in self._worker.model.named_parameters():
                parameter.copy_(torch.from_numpy(np.array(weights[name])))
        self._worker.sleep()
        self._worker.compute()
        return [parameter.grad.numpy() for parameter in self._worker.model.parameters() if parameter.grad is not None]


def main() -> None:
    setting = Setting.of_command_line(__doc__)
    with own_ray(setting.workers):
        train(setting)


@contextmanager
def own_ray(workers: int) -> Iterator[None]:
    """A Ray for this many workers and a parameter server, which finds no other one and leaves no files."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir=os.environ.get("TMPDIR")) as folder:
        ray.init(
            address="local",  # never somebody else's on this machine
            num_cpus=workers + 1,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=False,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def train(setting: Setting) -> None:
    server = ray.remote(num_cpus=1)(ParameterServer).remote(setting.size)
    actor = ray.remote(num_cpus=1)(Worker)
    workers = [actor.remote(setting.size, setting.case, number, setting.steps) for number in range(setting.workers)]
    ray.get([worker.ready.remote() for worker in workers])
    meter = MeterOfRoles(setting)
    weights: Any = server.get_weights.remote()
    ray.wait([weights])
    round, dropped, over = 0, 0, False
    flying: dict[Any, tuple[Any, int]] = {}  # a gradient to come -> its worker and its round
    idle = list(workers)
    gradients: list[Any]
    while not over:
        for worker in idle:
            flying[worker.compute_gradients.remote(weights)] = (worker, round)
        idle, gradients = [], []
        while len(gradients) < setting.quorum:
            (gradient,), _ = ray.wait(list(flying), num_returns=1, fetch_local=False)
            worker, its_round = flying.pop(gradient)
            if its_round == round:
                gradients.append(gradient)
                idle.append(worker)
            else:
                dropped += 1
                flying[worker.compute_gradients.remote(weights)] = (worker, round)
        weights = server.apply_gradients.remote(*gradients)
        del gradient, gradients
        ray.wait([weights])
        round += 1
        over = meter.tick()
    meter.print_result(_loss(setting.size, ray.get(weights)), dropped=dropped)


def _loss(size: str, weights: dict[str, NDArray[np.float32]]) -> float:
    """Of the first worker's first batch."""
    model = workload.model(size)
    model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    x, y = workload.batches(size, 0)
    with torch.no_grad():
        return workload.loss(model, x[0], y[0]).item()


if __name__ == "__main__":
    main()
