"""PyTorch DDP over gloo, or the same script with `quorate.DataParallel`.

The sleep stands for slow computing, so it is between forward and backward. (DataParallel would hide a sleep before the
forward behind the wait for the others, which only slow data deserve.)

python -m torch.distributed.run --nproc-per-node 8 -m benchmarks.peers.run_ddp --with ddp|quorate …
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from torch import nn

from benchmarks.peers.problem import Setting, TrainingMeter
from benchmarks.peers.torch_net import TorchShare, loss, net, sgd, weights_of

_LOOK_S = 0.001


def main() -> None:
    setting, given = Setting.of_command_line(__doc__, "with")
    dist.init_process_group("gloo")
    if vars(given)["with"] == "ddp":
        _ddp(setting)
    else:
        _quorate(setting)
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort a process that ends in order, also under plain DDP


def _ddp(setting: Setting) -> None:
    inside = net()
    model = nn.parallel.DistributedDataParallel(inside)
    optimizer = sgd(inside, setting)
    share = TorchShare(setting, dist.get_rank())
    dist.barrier()
    meter = TrainingMeter(setting, lambda: weights_of(inside))
    for step in range(setting.steps):
        images, labels = share.tensors(step)
        optimizer.zero_grad()
        found = loss(model, images, labels)
        time.sleep(share.sleeps[step])
        found.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            meter.tick()
    if dist.get_rank() == 0:
        meter.print_result()


def _quorate(setting: Setting) -> None:
    """Under a quorum a worker that sleeps looks every millisecond whether its version is over, and then leaves it."""
    import quorate

    inside = net()
    optimizer = sgd(inside, setting)
    everybody = setting.quorum == setting.workers
    policy = None if everybody else quorate.BackupSync(setting.quorum, setting.workers - setting.quorum)
    model = quorate.DataParallel(inside, optimizer, policy)
    share = TorchShare(setting, dist.get_rank())
    dist.barrier()
    meter = TrainingMeter(setting, lambda: weights_of(inside))
    ticked, is_over = 0, False
    while model.version < setting.steps and not is_over:
        with model.iteration():
            step, share.step = share.step, share.step + 1
            images, labels = share.tensors(step)
            optimizer.zero_grad()
            found = loss(model, images, labels)
            due = time.monotonic() + share.sleeps[step]
            while time.monotonic() < due and (everybody or not model.late):
                time.sleep(max(0.0, min(_LOOK_S, due - time.monotonic())))
            found.backward()
            optimizer.step()
        is_over = model.receipt is not None and model.receipt.over
        while dist.get_rank() == 0 and ticked < min(model.version, setting.steps):
            ticked += 1
            meter.tick()
    model.synchronize()
    model.finish()
    if dist.get_rank() == 0:
        meter.print_result()


if __name__ == "__main__":
    main()
