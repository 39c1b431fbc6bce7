"""Quorate's Local engine in the peers' own sweep: copy this file into a copy of that folder, as bench_quorate.py.

Install quorate where it runs (`venv/torch/bin/pip install /path/to/quorate`) and add to PEERS in run_all.py:

    "quorate8": ([PY("torch"), "bench_quorate.py", "--world", "8"], {}),
    "quorate6of8": ([PY("torch"), "bench_quorate.py", "--world", "8", "--n", "6"], {}),

One command:  python isolate.py venv/torch/bin/python bench_quorate.py --size 5M --case b --world 8 --n 6
"""

import torch
from torch.utils.data import TensorDataset

import quorate
import workload


class PeerTask:
    """TorchWorker's net, loss and batches, all workers' in one data set, so often that no epoch ends in the run."""

    batch_size = workload.BATCH

    def __init__(self, size, workers, batches):
        self.size, self.workers = size, workers
        self.copies = -(-batches // (workers * workload.POOL))

    def model(self):
        return workload.torch_model(self.size)

    def train_data(self):
        pools = [workload.make_batches(self.size, rank) for rank in range(self.workers)]
        parts = [
            torch.cat([torch.from_numpy(part).flatten(0, 1) for part in parts]) for parts in zip(*pools, strict=True)
        ]
        return TensorDataset(*(torch.cat([part] * self.copies) for part in parts))

    def loss(self, model, batch):
        x, y = batch
        return ((model(x) - y) ** 2).mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=workload.LR)


class PeerDraws(quorate.Latency):
    """Worker w's i-th ticket takes the i-th draw of worker w."""

    name, form, example = "peer-draws", "peer-draws:CASE", "peer-draws:b"

    def __init__(self, case):
        self.case = case

    def sampler(self, seed, workers):
        table = workload.all_draws(self.case, workers).tolist()
        return lambda worker, step, _row, _time_s: table[worker][step]

    def text(self):
        return f"{self.name}:{self.case}"

    def mean(self):
        return None

    def longest(self):
        return 1.0


class Ticks(quorate.Recorder):
    def __init__(self, meter):
        self.meter, self.loss = meter, None

    def applied(self, time, update):
        self.meter.tick()
        self.loss = update.loss


def main():
    given = workload.finish_args(workload.parser().parse_args())
    updates = given.warmup + given.updates
    full = given.n == given.world
    policy = quorate.FullSync() if full else quorate.BackupSync(given.n, given.world - given.n)
    latency = None if given.case == "a" else PeerDraws(given.case)
    engine = quorate.Local(given.world, latency=latency, threads=1)
    task = PeerTask(given.size, given.world, updates * given.n + given.world)
    ticks = Ticks(workload.Meter(given.warmup, given.updates))
    quorate.train(task, policy, engine, updates=updates, evaluate_every=10**9, recorders=(ticks,))
    workload.report("quorate" if full else "quorate-backup", given, ticks.meter.result(), loss=ticks.loss)


if __name__ == "__main__":
    from bench_quorate import main as run  # not __main__: worker processes import the task by this name

    run()
