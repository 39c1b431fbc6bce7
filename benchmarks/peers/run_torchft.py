"""torchft: DDP that goes on without a dead replica. A lighthouse, and a replica group of one process for each worker.

Every step asks the lighthouse for the quorum of the living, then sums over them; it waits for slow replicas.

.peers/torchft/bin/python -m benchmarks.peers.run_torchft --case b --workers 8 --quorum 8 …
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from datetime import timedelta
from typing import Any

from benchmarks.peers.problem import Setting, TrainingMeter

_PORT = 24000  # every run has a network of its own
_PATIENCE = timedelta(seconds=60)


def replica(setting: Setting, worker: int, lighthouse: str, barrier: Any) -> None:
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_PORT + worker),
        TORCHFT_LIGHTHOUSE=lighthouse,
    )
    logging.disable(logging.WARNING)
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    from benchmarks.peers.torch_net import TorchShare, loss, net, sgd, weights_of

    store = dist.TCPStore("127.0.0.1", _PORT + worker, is_master=True, wait_for_workers=False)
    inside = net()
    optimizer = sgd(inside, setting)

    def load(state: dict[str, Any]) -> None:
        inside.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_PATIENCE),
        min_replica_size=setting.workers,
        load_state_dict=load,
        state_dict=lambda: {"model": inside.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica {worker}",
        hostname="127.0.0.1",
        timeout=_PATIENCE,
        init_sync=False,  # all begin with the same weights; else one replica's gradient alone makes the first update
    )
    model = DistributedDataParallel(manager, inside)
    stepping = Optimizer(manager, optimizer)
    share = TorchShare(setting, worker)
    barrier.wait()
    meter = TrainingMeter(setting, lambda: weights_of(inside))
    while (before := manager.current_step()) < setting.steps:
        stepping.zero_grad()  # begins the step's quorum
        images, labels = share.next_tensors()
        loss(model, images, labels).backward()
        stepping.step()
        if worker == 0 and manager.current_step() > before:
            meter.tick()
    if worker == 0:
        meter.print_result()
    del store
    barrier.wait()
    manager.shutdown(wait=False)
    os._exit(0)


def main() -> None:
    setting, _ = Setting.of_command_line(__doc__)
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=setting.workers, join_timeout_ms=10_000, quorum_tick_ms=10
    )
    address = "http://127.0.0.1:" + lighthouse.address().rsplit(":", 1)[1]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(setting.workers)
    processes = [
        context.Process(target=replica, args=(setting, worker, address, barrier)) for worker in range(setting.workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
