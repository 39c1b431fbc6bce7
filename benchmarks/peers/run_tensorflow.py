"""TensorFlow 1's SyncReplicasOptimizer, the code of the paper's authors, or its asynchronous parameter server.

One parameter server and the workers, each a process, over gRPC; the net is a graph a worker (between-graph
replication). A quorum below the workers means backup workers: `replicas_to_aggregate` of `total_num_replicas`.

.peers/tensorflow/bin/python -m benchmarks.peers.run_tensorflow --case b --workers 8 --quorum 6 …
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import Any

from benchmarks.peers.problem import BATCH, WIDTHS, Setting, Share, TrainingMeter, first_weights

_PORT = 23000  # every run has a network of its own


def spec(workers: int) -> dict[str, list[str]]:
    return {"ps": [f"127.0.0.1:{_PORT}"], "worker": [f"127.0.0.1:{_PORT + 1 + worker}" for worker in range(workers)]}


def tensorflow() -> tuple[Any, Any, Any]:
    """tensorflow, its first version's names, and the settings of a session."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    tf1 = tf.compat.v1
    tf1.disable_v2_behavior()
    return tf, tf1, tf1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=2)


def serve(setting: Setting) -> None:
    tf, _, config = tensorflow()
    tf.distribute.Server(spec(setting.workers), job_name="ps", task_index=0, config=config).join()


class Graph:
    """A worker's graph: the variables lie on the parameter server."""

    def __init__(self, tf1: Any, setting: Setting, worker: int) -> None:
        where = f"/job:worker/task:{worker}"
        with tf1.device(tf1.train.replica_device_setter(worker_device=where, cluster=spec(setting.workers))):
            step = tf1.train.get_or_create_global_step()
            self.images = tf1.placeholder(tf1.float32, [BATCH, WIDTHS[0]])
            self.labels = tf1.placeholder(tf1.int64, [BATCH])
            self.variables = [
                tf1.get_variable(f"v{number}", initializer=tf1.constant(value))
                for number, value in enumerate(first_weights())
            ]
            hidden = self.images
            for weight, bias in zip(self.variables[::2], self.variables[1::2], strict=True):
                hidden = tf1.matmul(tf1.nn.relu(hidden) if weight is not self.variables[0] else hidden, weight) + bias
            loss = tf1.reduce_mean(tf1.nn.sparse_softmax_cross_entropy_with_logits(labels=self.labels, logits=hidden))
            optimizer = tf1.train.GradientDescentOptimizer(setting.rate)
            self.begin: list[Any] = []
            if setting.asynchronous:
                self.train = optimizer.minimize(loss, global_step=step)
            else:
                self.sync = tf1.train.SyncReplicasOptimizer(
                    optimizer, setting.quorum, total_num_replicas=setting.workers
                )
                self.train = self.sync.minimize(loss, global_step=step)
                # Without backups no token at the start: with TensorFlow's default a worker would be a step ahead.
                tokens = self.sync.get_init_tokens_op(0 if setting.quorum == setting.workers else -1)
                self.begin = [self.sync.chief_init_op, tokens]
            self.first = tf1.global_variables_initializer()


def work(setting: Setting, worker: int, ready: Any, barrier: Any, counts: Any, stop: Any) -> None:
    tf, tf1, config = tensorflow()
    server = tf.distribute.Server(spec(setting.workers), job_name="worker", task_index=worker, config=config)
    graph = Graph(tf1, setting, worker)
    session = tf1.Session(server.target, config=config)
    if worker == 0:
        for each in (graph.first, *graph.begin):
            session.run(each)
        ready.set()
    else:
        ready.wait()
        if not setting.asynchronous:
            session.run(graph.sync.local_step_init_op)
    share = Share(setting, worker)
    barrier.wait()
    if worker == 0:
        count = (
            (lambda meter: _each_gradient(meter, counts))
            if setting.asynchronous
            else (lambda meter: _each_update(meter, session, graph))
        )
        meter = TrainingMeter(setting, lambda: session.run(graph.variables))
        threading.Thread(target=lambda: (count(meter), meter.print_result(), stop.set()), daemon=True).start()
    while not stop.is_set():
        images, labels = share.next()
        session.run(graph.train, feed_dict={graph.images: images, graph.labels: labels})
        counts[worker] += 1
    time.sleep(60)  # the first process ends this one


def _each_update(meter: TrainingMeter, session: Any, graph: Graph) -> None:
    """Do what the chief's queue runner does for ever: sum a round, update, hand out tokens."""
    update = graph.sync.get_chief_queue_runner().enqueue_ops[0]
    while True:
        session.run(update)
        if meter.tick():
            return


def _each_gradient(meter: TrainingMeter, counts: Any) -> None:
    """Every gradient is an update: count them each millisecond."""
    seen = 0
    while True:
        time.sleep(0.001)
        while seen < sum(counts):
            seen += 1
            if meter.tick():
                return


def main() -> None:
    setting, _ = Setting.of_command_line(__doc__)
    context = multiprocessing.get_context("spawn")
    ready, stop, barrier = context.Event(), context.Event(), context.Barrier(setting.workers)
    counts = context.Array("i", setting.workers, lock=False)
    processes = [context.Process(target=serve, args=(setting,), daemon=True)]
    for worker in range(setting.workers):
        given = (setting, worker, ready, barrier, counts, stop)
        processes.append(context.Process(target=work, args=given, daemon=True))
    for process in processes:
        process.start()
    while not stop.wait(1.0):
        if any(process.exitcode is not None for process in processes):
            raise SystemExit(f"a process ended early: {[process.exitcode for process in processes]}")
    for process in processes:
        process.kill()


if __name__ == "__main__":
    main()
