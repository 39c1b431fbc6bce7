"""One run of the contract suite on the collective engine: `contract.py FOLDER`, which holds case.pkl.

Worker 0 writes FOLDER/error.txt if quorate refuses the case.
"""

from __future__ import annotations

import pickle
import random
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader

import quorate
from tests.contract.case import Case
from tests.data_parallel.scripts.meeting import meet
from tests.toy_tasks import Toy


def train(case: Case, worker: int) -> None:
    task, draw = Toy(case.make), random.Random(worker)
    module = task.model()
    optimizer = task.optimizer(module.parameters())
    sampler = quorate.Sampler(task.data, task.batch_size)
    model = quorate.DataParallel(module, optimizer, case.policy, sampler=sampler, out=case.out, patience_s=30.0)
    loader = DataLoader(task.data, batch_sampler=sampler)

    def iteration(batch: object) -> None:
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        time.sleep(draw.expovariate(500.0) * (4 if draw.random() < 0.1 else 1))
        loss.backward()
        optimizer.step()

    if case.updates is None:
        assert case.epochs is not None
        while sampler.epoch < case.epochs:
            for batch in loader:
                iteration(batch)
    else:
        batches = iter(loader)
        for _ in model.steps(case.updates):
            if (batch := next(batches, None)) is None:
                batches = iter(loader)
                batch = next(batches)
            iteration(batch)
    model.finish()
    model.finish()  # closing twice does no harm


def main() -> None:
    folder, (worker, _) = Path(sys.argv[1]), meet()
    try:
        train(pickle.loads((folder / "case.pkl").read_bytes()), worker)
    except quorate.BadInput as error:
        if worker == 0:
            (folder / "error.txt").write_text(str(error))
    dist.barrier()  # a process that is refused must not leave while others still connect
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
