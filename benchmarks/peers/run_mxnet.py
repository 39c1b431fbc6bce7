"""MXNet's KVStore: a scheduler, a server and the workers, each a process, over TCP; `dist_sync` or `dist_async`.

.peers/mxnet/bin/python -m benchmarks.peers.run_mxnet --case b --workers 8 --quorum 8 …
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from itertools import pairwise
from typing import Any

from benchmarks.peers.problem import WIDTHS, Array, Setting, Share, TrainingMeter, first_weights

_PORT = 25000  # every run has a network of its own


def join(setting: Setting, role: str, worker: int, counts: Any, stop: Any) -> None:
    os.environ.update(
        DMLC_ROLE=role,
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT=str(_PORT),
        DMLC_NUM_SERVER="1",
        DMLC_NUM_WORKER=str(setting.workers),
        DMLC_INTERFACE="lo",
        DMLC_NODE_HOST="127.0.0.1",
        MXNET_CPU_WORKER_NTHREADS="1",
    )
    import mxnet as mx  # the scheduler and the server never return from this import

    work(mx, setting, worker, counts, stop)


def work(mx: Any, setting: Setting, worker: int, counts: Any, stop: Any) -> None:
    store = mx.kv.create("dist_async" if setting.asynchronous else "dist_sync")
    net = mx.gluon.nn.HybridSequential()
    for layer, (before, after) in enumerate(pairwise(WIDTHS)):
        last = layer == len(WIDTHS) - 2
        net.add(mx.gluon.nn.Dense(after, in_units=before, activation=None if last else "relu"))
    net.initialize()
    parameters = list(net.collect_params().values())
    for parameter, value in zip(parameters, first_weights(), strict=True):
        parameter.set_data(mx.nd.array(value.T))
    net.hybridize()
    # The server sums the gradients of a round.
    scale = 1.0 if setting.asynchronous else 1.0 / setting.workers
    store.set_optimizer(mx.optimizer.SGD(learning_rate=setting.rate, rescale_grad=scale, wd=0.0))
    for number, parameter in enumerate(parameters):
        store.init(number, parameter.data())
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    share = Share(setting, worker)
    store._barrier()
    latest: list[Array] = first_weights()
    meter = TrainingMeter(setting, lambda: latest)
    if worker == 0 and setting.asynchronous:
        threading.Thread(target=_each_gradient, args=(meter, counts, stop), daemon=True).start()
    while not stop.is_set():
        images, labels = share.next()
        with mx.autograd.record():
            loss = loss_of(net(mx.nd.array(images)), mx.nd.array(labels)).mean()
        loss.backward()
        for number, parameter in enumerate(parameters):
            store.push(number, parameter.grad(), priority=-number)
            store.pull(number, parameter.data(), priority=-number)
        mx.nd.waitall()
        if worker == 0:
            latest[:] = [parameter.data().asnumpy().T for parameter in parameters]
        counts[worker] += 1
        if worker == 0 and not setting.asynchronous and meter.tick():
            stop.set()
    if worker == 0:
        meter.print_result()
    os._exit(0)  # the store's destructor would wait for the workers that are in a round without this one


def _each_gradient(meter: TrainingMeter, counts: Any, stop: Any) -> None:
    """Every gradient is an update: count them each millisecond."""
    seen = 0
    while not stop.is_set():
        time.sleep(0.001)
        while seen < sum(counts) and not stop.is_set():
            seen += 1
            if meter.tick():
                stop.set()


def main() -> None:
    setting, _ = Setting.of_command_line(__doc__)
    context = multiprocessing.get_context("spawn")
    counts, stop = context.Array("i", setting.workers, lock=False), context.Event()
    roles = [("scheduler", 0), ("server", 0)] + [("worker", worker) for worker in range(setting.workers)]
    processes = [
        context.Process(target=join, args=(setting, role, worker, counts, stop), daemon=True) for role, worker in roles
    ]
    for process in processes:
        process.start()
    processes[2].join()


if __name__ == "__main__":
    main()
