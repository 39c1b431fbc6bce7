"""The floor: the same processes, sleeps and gradients, but a worker sends four bytes instead of a gradient.

What this machine gives a system whose communication is free. With a quorum below the workers, those that are late
are woken from their sleep; what they have begun to compute they finish, and it is not used.

python -m benchmarks.local.run_floor --size 5M --case b --workers 8 --quorum 6
"""

from __future__ import annotations

import multiprocessing
import struct
import time
from multiprocessing.connection import Connection, wait

from benchmarks.local.measuring import Meter, Setting
from benchmarks.local.workload import Worker, optimizer

_ROUND = struct.Struct("i")


def work(setting: Setting, rank: int, pipe: Connection) -> None:
    worker = Worker(setting.size, setting.case, rank, setting.steps)
    optimize = optimizer(worker.model)
    interruptible = setting.quorum < setting.workers
    pipe.send_bytes(b"ready")
    while True:
        told = pipe.recv_bytes()
        while pipe.poll():  # rounds that passed meanwhile
            told = pipe.recv_bytes()
        if worker.sleep(pipe.poll if interruptible else time.sleep):
            continue
        worker.compute()
        optimize.step()
        pipe.send_bytes(told)


def main() -> None:
    setting = Setting.of_command_line(__doc__)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(setting.workers):
        pipe, theirs = context.Pipe()
        process = context.Process(target=work, args=(setting, rank, theirs), daemon=True)
        process.start()
        pipes.append(pipe)
        processes.append(process)
    for pipe in pipes:
        pipe.recv_bytes()
    meter = Meter(setting)
    round, over = 0, False
    while not over:
        for pipe in pipes:
            pipe.send_bytes(_ROUND.pack(round))
        arrived = 0
        while arrived < setting.quorum:
            for ready in wait(pipes):
                assert isinstance(ready, Connection)
                arrived += _ROUND.unpack(ready.recv_bytes())[0] == round
        round += 1
        over = meter.tick()
    meter.print_result()
    for process in processes:
        process.terminate()
        process.join()


if __name__ == "__main__":
    main()
