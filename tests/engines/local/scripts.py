"""Scripts that are run as a user would run them."""

from __future__ import annotations

#: A task in the script itself; {guard} is `if __name__ == "__main__":` or `if True:`, {top} stands before everything.
OWN_TASK = """
import argparse
import sys
import torch
from torch.nn import functional
import quorate
torch.set_num_threads(1)
{top}
SCALE = 0.5  # a global of the script, which its functions must find in a worker too

def scaled(loss):
    return loss * SCALE

class Mine:
    batch_size = 4
    def __init__(self, samples=40):
        self.data = torch.utils.data.TensorDataset(torch.randn(samples, 3), torch.randint(0, 2, (samples,)))
    def model(self):
        return torch.nn.Linear(3, 2)
    def train_data(self):
        return self.data
    def loss(self, model, batch):
        return scaled(functional.cross_entropy(model(batch[0]), batch[1]))
    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)

{guard}
    result = quorate.train(Mine(), quorate.FullSync(), quorate.Local(2), epochs=2)
    print(result.summary["samples"], result.digest)
"""
GUARD, NO_GUARD = 'if __name__ == "__main__":', "if True:"
READS_ARGUMENTS = """
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, required=True)
options = parser.parse_args()
"""

#: Trains until it is stopped, and says who works for it. A file named hang in its folder stops the workers.
ENDLESS = """
import json, os, sys
import torch
import quorate
from tests.engines.local.tasks import Disturbed, Mishap
torch.set_num_threads(1)

def say(progress):
    if progress.updates == 10:
        print(json.dumps(sorted(engine.processes().values())), flush=True)

if __name__ == "__main__":
    engine, out = quorate.Local(3), sys.argv[1]
    task = Disturbed(Mishap("forward", "sleep", sample=None, after=f"{out}/hang"), seconds=0.01)
    quorate.train(
        task, quorate.BackupSync(2, 1), engine, updates=1_000_000, out=out, checkpoint_every=3, on_progress=say
    )
"""
