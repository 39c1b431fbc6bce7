"""One training: a torch.distributed script in four processes that share this machine's cores.

Nobody sleeps: a long sequence takes longer to compute, so its gradient tends to be late. `run` starts the processes;
run as a script, this file is one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import quorate
from experiments.language.training import MADE_UP
from experiments.lengths.settings import (
    FULL_SYNC,
    GONE,
    LENGTHS,
    QUORUMS,
    SEQUENCES,
    WORKERS,
    OfLength,
    Training,
)
from quorate.errors import QuorateError
from quorate.tasks.charlm import TEST_SHARE, CharNet, load_shakespeare

_TESTED = 32  # items of each length
_LIMIT_S = 1800.0


def run(trial: Training, data: Path | None = None, quick: bool = False) -> list[OfLength]:
    """Train in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        given = {"trial": asdict(trial), "data": None if data is None else str(data), "quick": quick, "out": str(out)}
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}"]
        command = [sys.executable, *launch, "-m", "experiments.lengths.training", json.dumps(given)]
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        environment = {**os.environ, **settings, "TMPDIR": folder}  # torchrun leaves a folder of logs there
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        if not out.exists():
            raise QuorateError(f"the training's processes failed:\n{done.stderr[-2000:]}")
        return [OfLength(*row) for row in json.loads(out.read_text())]


class Items:
    """The text as items [SEQUENCES, length + 1]: item i has the length LENGTHS[i % 4]."""

    def __init__(self, text: str, items: int, seed: int) -> None:
        letters = sorted(set(text))
        numbers = {letter: number for number, letter in enumerate(letters)}
        self.kinds = len(letters)
        everything = torch.tensor([numbers[letter] for letter in text])
        cut = round(len(everything) * (1 - TEST_SHARE))
        self._train, self._test = everything[:cut], everything[cut:]
        self._starts = _starts(items, len(self._train), seed)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, item: int) -> Tensor:
        return _sequences(self._train, self._starts[item], LENGTHS[item % len(LENGTHS)])

    def tested(self, length: int) -> Iterator[Tensor]:
        """Items of one length that are never trained on; the same for every seed."""
        for starts in _starts(_TESTED, len(self._test), 0):
            yield _sequences(self._test, starts, length)


def _starts(items: int, letters: int, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, letters - LENGTHS[-1] - 1, (items, SEQUENCES), generator=draws)


def _sequences(letters: Tensor, starts: Tensor, length: int) -> Tensor:
    return torch.stack([letters[start : start + length + 1] for start in starts.tolist()])


def loss_of(model: torch.nn.Module, item: Tensor) -> Tensor:
    """Nats a character."""
    return functional.cross_entropy(model(item[:, :-1]).flatten(0, 1), item[:, 1:].flatten())


# ---------------------------------------------------------------- one of the processes


def main() -> None:
    given = json.loads(sys.argv[1])
    trial = Training(**given["trial"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    items = Items(MADE_UP if given["quick"] else load_shakespeare(given["data"]), trial.items, trial.seed)
    torch.manual_seed(trial.seed)
    net = CharNet(items.kinds, LENGTHS[-1], trial.width, layers=2, heads=2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    quorum = QUORUMS[trial.how]
    policy = quorate.FullSync() if trial.how == FULL_SYNC else quorate.BackupSync(quorum, WORKERS - quorum)
    sampler = None if trial.how == GONE else quorate.Sampler(items, batch_size=1, seed=trial.seed)
    model = quorate.DataParallel(net, optimizer, policy, sampler=sampler)
    used, computed = torch.zeros(len(LENGTHS)), torch.zeros(len(LENGTHS))
    began = time.monotonic()
    for item in _dealt(trial, model) if sampler is None else _lent(trial, sampler):
        which = item % len(LENGTHS)
        computed[which] += 1
        with model.iteration():
            optimizer.zero_grad()
            loss_of(model, items[item]).backward()
            optimizer.step()
        used[which] += model.receipt is not None and model.receipt.applied
    model.meet()
    seconds = time.monotonic() - began
    for count in (used, computed):
        dist.all_reduce(count)
    if dist.get_rank() == 0:
        rows = [
            OfLength(length, int(used[i]), int(computed[i]), _tested(net, items, length), seconds)
            for i, length in enumerate(LENGTHS)
        ]
        Path(given["out"]).write_text(json.dumps(rows))
    model.finish()


def _lent(trial: Training, sampler: quorate.Sampler) -> Iterator[int]:
    """As the ledger lends them: what was dropped comes again."""
    for _ in range(trial.epochs):
        for (item,) in sampler:
            yield item


def _dealt(trial: Training, model: quorate.DataParallel) -> Iterator[int]:
    """As a DistributedSampler deals them: a process goes through its share, and what was dropped is gone."""
    pile: list[int] = []
    epoch = 0
    for _ in model.steps(trial.updates):
        if not pile:
            order = torch.randperm(trial.items, generator=torch.Generator().manual_seed(1000 * trial.seed + epoch))
            pile = order[model.worker :: WORKERS].tolist()
            epoch += 1
        yield pile.pop()


@torch.no_grad()
def _tested(net: torch.nn.Module, items: Items, length: int) -> float:
    return float(torch.stack([loss_of(net, item) for item in items.tested(length)]).mean())


if __name__ == "__main__":
    main()
