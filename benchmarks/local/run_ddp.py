"""PyTorch DDP over gloo.

python -m torch.distributed.run --nproc-per-node 8 -m benchmarks.local.run_ddp --workers 8 --size 5M --case b
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.local.measuring import Meter, Setting
from benchmarks.local.workload import Worker, optimizer


def main() -> None:
    setting = Setting.of_command_line(__doc__)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if not setting.workers == setting.quorum == world:
        raise SystemExit(f"DDP waits for every worker: --workers and --quorum must be {world}, as --nproc-per-node is")
    worker = Worker(setting.size, setting.case, rank, setting.steps)
    worker.model = DistributedDataParallel(worker.model)
    optimize = optimizer(worker.model)
    meter = Meter(setting)
    loss = torch.zeros(())
    dist.barrier()
    for _ in range(setting.steps):
        worker.sleep()
        loss = worker.compute()
        optimize.step()
        if rank == 0:
            meter.tick()
    if rank == 0:
        meter.print_result(loss.item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
