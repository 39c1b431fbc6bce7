"""The parameter server of Ray's documentation: an actor for the parameters, actors for the workers, `ray.wait`.

An update takes the first `quorum` gradients of its round. A late gradient is thrown away; its worker gets a task of the
current round when it has returned. Asynchronous: each gradient is an update.

python -m benchmarks.peers.run_ray_pattern --case b --workers 8 --quorum 6 …
"""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
import torch

from benchmarks.peers.problem import Array, Setting, TrainingMeter
from benchmarks.peers.torch_net import TorchShare, gradients, net, sgd, weights_of
from benchmarks.ray.run_peer import own_ray


class Server:
    """Has the parameters and steps the optimizer."""

    def __init__(self, setting: Setting) -> None:
        self._model = net()
        self._optimizer = sgd(self._model, setting)

    def apply(self, *found: list[Array]) -> list[Array]:
        for parameter, parts in zip(self._model.parameters(), zip(*found, strict=True), strict=True):
            parameter.grad = torch.from_numpy(np.stack(parts).sum(axis=0) / len(parts))
        self._optimizer.step()
        return self.weights()

    def weights(self) -> list[Array]:
        return weights_of(self._model)


class Worker:
    """Sleeps, then computes the gradient of its next batch."""

    def __init__(self, setting: Setting, worker: int) -> None:
        self._share = TorchShare(setting, worker)
        self._model = net()

    def ready(self) -> bool:
        return True

    def gradient(self, weights: list[Array]) -> list[Array]:
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), weights, strict=True):
                parameter.copy_(torch.from_numpy(value.T.copy()))
        return gradients(self._model, *self._share.next_tensors())


def train(setting: Setting) -> None:
    server = ray.remote(num_cpus=1)(Server).remote(setting)
    actor = ray.remote(num_cpus=1)(Worker)
    workers = [actor.remote(setting, worker) for worker in range(setting.workers)]
    ray.get([worker.ready.remote() for worker in workers])
    weights: Any = server.weights.remote()
    ray.wait([weights])
    meter = TrainingMeter(setting, lambda: ray.get(weights))
    round, over = 0, False
    flying: dict[Any, tuple[Any, int]] = {}  # a gradient to come -> its worker and its round
    idle = list(workers)
    while not over:
        for worker in idle:
            flying[worker.gradient.remote(weights)] = (worker, round)
        idle, found = [], []
        while len(found) < setting.quorum:
            (gradient,), _ = ray.wait(list(flying), num_returns=1, fetch_local=False)
            worker, its_round = flying.pop(gradient)
            if its_round == round or setting.asynchronous:
                found.append(gradient)
                idle.append(worker)
            else:
                flying[worker.gradient.remote(weights)] = (worker, round)
        weights = server.apply.remote(*found)
        del gradient, found
        ray.wait([weights])
        round += 1
        over = meter.tick()
    meter.print_result()


def main() -> None:
    setting, _ = Setting.of_command_line(__doc__)
    with own_ray(setting.workers):
        train(setting)


if __name__ == "__main__":
    main()
