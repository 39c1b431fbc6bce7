"""Quorate's own engines: local processes, or Ray on this machine.

python -m benchmarks.peers.run_engine --engine local|ray --case b --workers 8 --quorum 6 …
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quorate
from benchmarks.local.task import PeerDraws
from benchmarks.peers import torch_net
from benchmarks.peers.problem import BATCH, SEED, TRAINED, Setting, TrainingMeter, accuracy, digits
from quorate.events import Ticket
from quorate.trace import Update


class Digits:
    """The problem as a task; the ledger's order of the samples is the one that all contenders follow."""

    batch_size = BATCH

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def model(self) -> nn.Module:
        return torch_net.net()

    def train_data(self) -> TensorDataset:
        images, labels = digits()
        return TensorDataset(torch.from_numpy(images[:TRAINED]), torch.from_numpy(labels[:TRAINED]))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch_net.loss(model, *batch)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.setting.rate)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"accuracy": accuracy(torch_net.weights_of(model))}


class _Ticks(quorate.Recorder):
    """Meters the updates; the clock starts with the first ticket."""

    def __init__(self, setting: Setting) -> None:
        self.meter = TrainingMeter(setting)
        self._has_begun = False

    def started(self, time: float, ticket: Ticket) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.meter.begin()

    def applied(self, time: float, update: Update) -> None:
        self.meter.tick()

    def evaluated(self, time: float, version: int, measures: dict[str, float]) -> None:
        self.meter.evaluated(version, measures["accuracy"])


def main() -> None:
    setting, given = Setting.of_command_line(__doc__, "engine")
    workers, quorum = setting.workers, setting.quorum
    policy: quorate.Policy = quorate.FullSync() if quorum == workers else quorate.BackupSync(quorum, workers - quorum)
    if setting.asynchronous:
        policy = quorate.Async()
    latency = None if setting.case == "a" else PeerDraws(setting.case, 8 * setting.steps)
    engine = (
        quorate.Ray(workers, latency=latency)
        if given.engine == "ray"
        else quorate.Local(workers, latency=latency, threads=1)
    )
    ticks = _Ticks(setting)
    quorate.train(
        Digits(setting),
        policy,
        engine,
        updates=setting.steps,
        seed=SEED,
        evaluate_every=setting.evaluate_every,
        recorders=(ticks,),
    )
    ticks.meter.print_result()


if __name__ == "__main__":
    main()
