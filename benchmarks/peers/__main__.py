"""python -m benchmarks.peers [--cases a b c] [--repeats N] [--only NAME ...] [--out FILE] [--quick]

Quorate's local engine, Ray engine and DataParallel beside DDP, torchft, TensorFlow's SyncReplicasOptimizer and its
asynchronous server, MXNet's KVStore, and the parameter server of Ray's documentation. Everybody trains the same net
from the same weights on the same batches with the same sleeps, 8 workers on this machine, each run in a process tree
and, as root, a network of its own. Contenders take turns, beginning with another one each repeat. Every run uses
equally many gradients. Exit code 1 if a contender failed; one without an environment is left out:

python -m benchmarks.peers.environments     makes an environment for each peer
python -m benchmarks.tables --write         puts the tables of the committed run into docs/peers.md
python -m benchmarks.peers.figure           draws its figure

a: nobody sleeps · b: 50 ms + Exp(25 ms) before each gradient · c: 50 ms, 4 % of the time 500 ms
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.local.isolated import can_isolate
from benchmarks.local.turns import machine, say, take_turns, with_own_ray
from benchmarks.local.workload import CASES
from benchmarks.peers.environments import PACKAGES, python_of
from benchmarks.peers.problem import BATCH, ORDER, SEED, TRAINED, Setting

WORKERS = 8
GRADIENTS, QUICK_GRADIENTS = 160 * WORKERS, 30 * WORKERS  # of a run, those before the measuring included
WARMUP = 10  # rounds of all workers


class Peer(NamedTuple):
    """A contender. quorum: gradients that make an update; 1: asynchronous."""

    label: str
    quorum: int
    module: str
    flags: tuple[str, ...] = ()
    environment: str | None = None  # None: quorate's own
    launched: bool = False  # by torch.distributed.run


#: By the name on the command line.
PEERS = {
    "ddp": Peer("PyTorch DDP", 8, "run_ddp", ("--with=ddp",), launched=True),
    "torchft": Peer("torchft", 8, "run_torchft", environment="torchft"),
    "tensorflow": Peer("TensorFlow SyncReplicas", 8, "run_tensorflow", environment="tensorflow"),
    "tensorflow-backup": Peer("TensorFlow SyncReplicas 6+2", 6, "run_tensorflow", environment="tensorflow"),
    "tensorflow-async": Peer("TensorFlow async", 1, "run_tensorflow", environment="tensorflow"),
    "mxnet": Peer("MXNet dist_sync", 8, "run_mxnet", environment="mxnet"),
    "mxnet-async": Peer("MXNet dist_async", 1, "run_mxnet", environment="mxnet"),
    "ray-pattern": Peer("Ray's pattern", 8, "run_ray_pattern"),
    "ray-pattern-first": Peer("Ray's pattern, first 6", 6, "run_ray_pattern"),
    "ray-pattern-async": Peer("Ray's pattern, async", 1, "run_ray_pattern"),
    "local": Peer("quorate local", 8, "run_engine", ("--engine=local",)),
    "local-backup": Peer("quorate local 6+2", 6, "run_engine", ("--engine=local",)),
    "local-async": Peer("quorate local async", 1, "run_engine", ("--engine=local",)),
    "ray": Peer("quorate Ray", 8, "run_engine", ("--engine=ray",)),
    "ray-backup": Peer("quorate Ray 6+2", 6, "run_engine", ("--engine=ray",)),
    "data-parallel": Peer("quorate DataParallel", 8, "run_ddp", ("--with=quorate",), launched=True),
    "data-parallel-backup": Peer("quorate DataParallel 6+2", 6, "run_ddp", ("--with=quorate",), launched=True),
}


class Contender(NamedTuple):
    name: str
    setting: Setting

    @property
    def label(self) -> str:
        return self.name

    def command(self) -> list[str]:
        peer = PEERS[self.name]
        python = [python_of(peer.environment) if peer.environment else sys.executable, "-m"]
        if peer.launched:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            python += ["torch.distributed.run", f"--nproc-per-node={WORKERS}", f"--master-port={port}", "-m"]
        return [*map(str, python), f"benchmarks.peers.{peer.module}", *self.setting.flags(), *peer.flags]


def contender(name: str, case: str, gradients: int, folder: str) -> Contender:
    quorum = PEERS[name].quorum
    warmup = WARMUP * WORKERS // quorum
    updates = gradients // quorum - warmup
    return Contender(name, Setting(case, WORKERS, quorum, updates, warmup, folder, asynchronous=quorum == 1))


def write_order(folder: str, batches: int) -> None:
    """The samples [batches, BATCH] that a ledger with the run's seed hands out, for those who have no ledger."""
    from quorate.ledger import Ledger

    ledger = Ledger(TRAINED, BATCH, seed=SEED)
    np.save(Path(folder) / ORDER, np.array([ledger.indices(batch) for batch in range(batches)]))


def main() -> int:
    parser = argparse.ArgumentParser(
        "benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--only", nargs="+", choices=PEERS, metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each contender (default 1)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_GRADIENTS} gradients a run, not {GRADIENTS}")
    parser.add_argument("--timeout", type=float, default=400.0, metavar="S", help="seconds a run may take")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the figures of all runs are written, as JSON")
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    missing = {name for name in PACKAGES if python_of(name) is None}
    for name in sorted(missing):
        say(f"{name} is left out: it has no environment; python -m benchmarks.peers.environments {name} makes one")
    names = [name for name in given.only or PEERS if PEERS[name].environment not in missing]
    if not can_isolate():
        say("Not root, or no unshare and ip: contenders run without namespaces of their own; bytes are the machine's.")
    gradients = QUICK_GRADIENTS if given.quick else GRADIENTS
    report: dict[str, Any] = {
        "machine": machine(),
        "packages": {name: PACKAGES[name] for name in PACKAGES if name not in missing},
        "gradients": gradients,
        "runs": [],
    }
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        write_order(folder, 2 * gradients)
        for repeat in range(given.repeats):
            for case in given.cases:
                say(f"case {case}, repeat {repeat + 1} of {given.repeats}")
                everyone = [contender(name, case, gradients, folder) for name in names]
                found = take_turns(everyone, repeat, partial(with_own_ray, timeout_s=given.timeout))
                report["runs"] += [
                    {"case": case, "contender": one.name, "quorum": one.setting.quorum, "repeat": repeat, **run}
                    for one, run in found.items()
                ]
                if given.out is not None:
                    given.out.write_text(json.dumps(report) + "\n", encoding="utf-8")
    if given.out is None:
        print(json.dumps(report))
    return int(any("failed" in run for run in report["runs"]))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
