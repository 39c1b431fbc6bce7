"""Trains under quorums, with processes that are late on purpose: `quorums.py FOLDER`.

Every process writes FOLDER/seen<worker>.json: by case, what it did and saw. The traces are in FOLDER/<case>.
Nobody is late by the clock: a process that is to be late waits until its version is over.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quorate
from tests.data_parallel.scripts.meeting import meet, say

BATCH = 4
LIMIT_S = 30.0


def net() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 3))
    return layers.double()


def batch(worker: int, number: int) -> Tensor:
    draw = torch.Generator().manual_seed(10_000 * worker + number)
    return torch.randn(BATCH, 5, generator=draw, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def lr_at(version: int) -> float:
    return 0.1 / (1 + version)


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.0005)


class Case:
    """One run of this process."""

    def __init__(self, folder: Path, name: str, policy: quorate.Policy, **options: Any) -> None:
        torch.manual_seed(7)
        self.name = name
        module = net()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
        self.model = quorate.DataParallel(
            module, self.optimizer, policy, out=folder / name, check_every=1, patience_s=LIMIT_S, **options
        )
        self.seen: dict[str, Any] = {"receipts": [], "used": {}, "late": []}
        self._store: Any = dist.distributed_c10d._get_default_store()

    def has_ended(self) -> None:
        self._store.add(f"{self.name} ended", 1)

    def wait_until_late(self) -> bool:
        """Until the version here is over. Where somebody has ended, everybody else may be waiting for this process."""
        until(lambda: self.model.late or self._store.add(f"{self.name} ended", 0))
        return self.model.late

    def step(self, number: int) -> Any:
        """`optimizer.step()`, and what became of it."""
        read = self.model.version
        self.optimizer.param_groups[0]["lr"] = lr_at(read)
        receipt: Any = self.optimizer.step()
        self.optimizer.zero_grad()
        self.note(receipt)
        if receipt.applied:
            self.seen["used"][receipt.version] = number
        return receipt

    def note(self, receipt: Any) -> None:
        assert receipt is self.model.receipt
        assert receipt.version == self.model.version
        self.seen["receipts"].append(receipt._asdict())

    def end(self) -> dict[str, Any]:
        self.model.finish()
        self.seen |= {"digest": self.model.digest(), "version": self.model.version}
        self.seen["parameters"] = {name: one.tolist() for name, one in self.model.module.state_dict().items()}
        return self.seen


def train(
    case: Case, worker: int, iterations: int, *, late_at: Callable[[int], bool], nan_at: int = -1, slow_s: float = 0.0
) -> None:
    for number in range(iterations):
        loss = loss_of(case.model, batch(worker, number))
        if late_at(number) and case.wait_until_late():
            case.seen["late"].append(number)
        time.sleep(slow_s)
        (loss * float("nan") if number == nan_at else loss).backward()
        if case.step(number).over:
            return
    case.has_ended()


def refusing(folder: Path, worker: int) -> dict[str, Any]:
    """A gradient of worker 0 is NaN, where all must be in, so that its version waits for its next batch."""
    case = Case(folder, "nan", quorate.BackupSync(3, 0))
    train(case, worker, 12, late_at=lambda number: False, nan_at=5 if worker == 0 else -1)
    return case.end()


def straggler(folder: Path, worker: int, name: str, policy: quorate.Policy) -> dict[str, Any]:
    """Worker 2 is late in every third iteration."""
    case = Case(folder, name, policy)
    train(case, worker, 25, late_at=lambda number: worker == 2 and number % 3 == 1)
    if worker == 1:
        case.model.record(accuracy=0.5)
    return case.end()


def adapting(folder: Path, worker: int) -> dict[str, Any]:
    """A quorum that follows what is seen: worker 2 is always slow, and the policy may wait for it or not."""
    case = Case(folder, "adaptive", quorate.AdaptiveBackup(min_quorum=1))
    train(case, worker, 25, late_at=lambda number: False, slow_s=0.005 if worker == 2 else 0.0)
    return case.end()


def abandoning(folder: Path, worker: int) -> dict[str, Any]:
    """Worker 2 is late again, but in `iteration()`: what follows the next parameter it reads is never run."""
    case = Case(folder, "abandon", quorate.BackupSync(2, 1))
    reached = []
    for number in range(20):
        late = worker == 2 and number % 4 == 2
        before = case.model.receipt
        with case.model.iteration():
            if late:
                loss_of(case.model, batch(worker, number))
                if case.wait_until_late():
                    case.seen["late"].append(number)
            loss_of(case.model, batch(worker, number)).backward()
            reached.append(number)
            case.step(number)
        if case.model.receipt is not before and number not in reached:
            case.note(case.model.receipt)
        assert case.model.receipt is not None
        if case.model.receipt.over:
            break
    case.has_ended()
    case.seen["reached"] = reached
    return case.end()


def uneven(folder: Path, worker: int) -> dict[str, Any]:
    case = Case(folder, "uneven", quorate.BackupSync(2, 1))
    train(case, worker, (6, 14, 9)[worker], late_at=lambda number: False)
    return case.end()


def evaluating(folder: Path, worker: int) -> dict[str, Any]:
    """Worker 1 looks at its model for a long time, while the others make versions."""
    case = Case(folder, "evaluate", quorate.BackupSync(2, 1))
    store: Any = dist.distributed_c10d._get_default_store()
    if worker == 1:
        train(case, worker, 2, late_at=lambda number: False)
        case.model.eval()
        seen = [case.model.digest()]
        store.set("looking", "yes")
        with torch.no_grad():
            outputs = [case.model(batch(1, 0)).tolist()]
            while store.add("made", 0) < 5:
                seen.append(case.model.digest())
                outputs.append(case.model(batch(1, 0)).tolist())
        case.seen["digests"], case.seen["outputs"] = seen, outputs
        case.seen["looked_at"] = case.model.version
        case.model.train()
        train(case, worker, 1, late_at=lambda number: False)
    else:
        train(case, worker, 3, late_at=lambda number: False)
        until(lambda: store.check(["looking"]))
        for _ in range(6):
            if case.seen["receipts"][-1]["over"]:  # the others were so much quicker that they have ended
                store.add("made", 6)
                break
            train(case, worker, 1, late_at=lambda number: False)
            if worker == 0:
                store.add("made", 1)
    return case.end()


def lending(folder: Path, worker: int) -> dict[str, Any]:
    """A sampler of ours: 62 samples in batches of 4 (one of 2), 2 epochs, and worker 2 late now and then."""
    data = torch.randn(62, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    sampler = quorate.Sampler(62, BATCH, seed=5)
    case = Case(folder, "lending", quorate.BackupSync(2, 1), sampler=sampler)
    loader = DataLoader(TensorDataset(data, torch.arange(62)), batch_sampler=sampler)
    applied: list[list[int]] = [[], []]
    count = 0
    for epoch in range(2):
        for x, numbers in loader:
            count += 1
            loss = loss_of(case.model, x)
            if worker == 2 and count % 3 == 1:
                # Its batch may be pinned, or the last: then everybody waits for this process, and it cannot be late.
                end = time.monotonic() + 0.2
                while not case.model.late and time.monotonic() < end:
                    time.sleep(0.0005)
            loss.backward()
            if case.step(count).applied:
                applied[epoch] += numbers.tolist()
    case.seen["applied"] = applied
    return case.end()


def cases(folder: Path, worker: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    backup, backup_finish = quorate.BackupSync(2, 1), quorate.BackupSync(2, 1, late="finish")
    yield "cancel", lambda: straggler(folder, worker, "cancel", backup)
    yield "finish", lambda: straggler(folder, worker, "finish", backup_finish)
    deadline = quorate.Deadline(limit=0.02, min_quorum=1)
    yield "deadline", lambda: straggler(folder, worker, "deadline", deadline)
    deadline_finish = quorate.Deadline(limit=0.02, min_quorum=2, late="finish")
    yield "deadline-finish", lambda: straggler(folder, worker, "deadline-finish", deadline_finish)
    yield "nan", lambda: refusing(folder, worker)
    yield "adaptive", lambda: adapting(folder, worker)
    yield "abandon", lambda: abandoning(folder, worker)
    yield "uneven", lambda: uneven(folder, worker)
    yield "evaluate", lambda: evaluating(folder, worker)
    yield "lending", lambda: lending(folder, worker)


def main() -> None:
    worker, _ = meet()
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    seen = {}
    for name, run in cases(folder, worker):
        if not only or name in only:
            say(f"case {name}")
            seen[name] = run()
    (folder / f"seen{worker}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
