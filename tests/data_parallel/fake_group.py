"""A process group whose processes are threads of this one, and whole data planes on top of it.

An all-reduce here is a sum in the order of the workers, so its bits can be known beforehand, and it may take as long as
a test likes at every step. So hundreds of versions with every kind of lateness take seconds, without a network.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quorate.data_parallel.buckets import BucketLayout, buffers_of
from quorate.data_parallel.control.hub import RELAYED
from quorate.data_parallel.coordinator_thread import CoordinatorThread
from quorate.data_parallel.full_sync import FullSyncPlane
from quorate.data_parallel.iterations import FullSyncIterations, Iterations, QuorumIterations
from quorate.data_parallel.lazy_tensors import Guard
from quorate.data_parallel.optimizer_steps import PartialSteps, Takeover
from quorate.data_parallel.quorum import QuorumPlane
from quorate.errors import QuorateError
from quorate.learner import digest
from quorate.ledger import Ledger
from quorate.policies import Policy
from tests.data_parallel.fake_processes import PlayedHub

LONG_S = 60.0  # what takes longer hangs


class Gathering:
    """Adds up tensors of all workers, call by call.

    most_s: an all-reduce begins and ends up to so many seconds later than it could, drawn for each worker.
    """

    def __init__(self, workers: int, *, seed: int = 0, most_s: float = 0.0) -> None:
        self.workers, self._most_s = workers, most_s
        self._changed = threading.Condition()
        self._calls: dict[int, dict[int, Tensor]] = {}
        self._summed: set[int] = set()
        self._random = [random.Random(f"{seed} {worker}") for worker in range(workers)]
        self.sizes: list[list[int]] = [[] for _ in range(workers)]  # of each call, by worker: all must be alike

    def of(self, worker: int) -> Member:
        return Member(self, worker)

    def dawdle(self, worker: int) -> None:
        if self._most_s:
            time.sleep(self._random[worker].random() ** 4 * self._most_s)

    def join(self, worker: int, tensor: Tensor) -> int:
        self.dawdle(worker)
        with self._changed:
            number = len(self.sizes[worker])
            self.sizes[worker].append(tensor.numel())
            call = self._calls.setdefault(number, {})
            call[worker] = tensor
            if len(call) == self.workers:
                self._add_up(number)
            return number

    def _add_up(self, number: int) -> None:
        tensors = [tensor for _, tensor in sorted(self._calls.pop(number).items())]
        assert len({tensor.numel() for tensor in tensors}) == 1, "workers disagree about which piece is next"
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        for tensor in tensors:
            tensor.copy_(total)
        self._summed.add(number)
        self._changed.notify_all()

    def wait(self, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._summed, LONG_S):
                raise RuntimeError(f"all-reduce {number} hangs")


class Member:
    """One worker's end."""

    def __init__(self, gathering: Gathering, worker: int) -> None:
        self._gathering, self._worker = gathering, worker

    def allreduce(self, tensors: list[Tensor]) -> Pending:
        assert len(tensors) == 1
        return Pending(self._gathering, self._worker, self._gathering.join(self._worker, tensors[0]))


class Pending:
    """An all-reduce that somebody may still have to join."""

    def __init__(self, gathering: Gathering, worker: int, number: int) -> None:
        self._gathering, self._worker, self._number = gathering, worker, number

    def wait(self) -> None:
        self._gathering.wait(self._number)
        self._gathering.dawdle(self._worker)


class FakeProcess:
    """One worker: a net, an optimizer, and the driver that `DataParallel` would have."""

    driver: Iterations
    optimizer: Optimizer

    def __init__(self, worker: int, net: nn.Module) -> None:
        self.worker, self.net = worker, net
        self.versions: dict[
            int, str
        ] = {}  # digest of the parameters after each version, as the updating thread sees it
        self.error: BaseException | None = None

    def step(self) -> Any:
        receipt: Any = self.optimizer.step()
        self.optimizer.zero_grad()
        return receipt

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self.net.state_dict().items()}


class World:
    """Workers in threads, each with its data plane; under a quorum with a coordinator of their own.

    delay: by iteration, for full (0) and delayed sync; policy: where a quorum decides.
    """

    def __init__(
        self,
        make_net: Callable[[], nn.Module],
        make_optimizer: Callable[[Any], Optimizer],
        workers: int,
        *,
        policy: Policy | None = None,
        delay: int = 0,
        delay_at: Callable[[int], int] | None = None,
        clip_norm: float | None = None,
        piece_bytes: int | None = 400,
        seed: int = 0,
        most_s: float = 0.0,
        sits_out: Callable[[int, int], bool] = lambda worker, round: False,
    ) -> None:
        self.gathering = Gathering(workers, seed=seed, most_s=most_s)
        self._hub, self._policy = PlayedHub(workers), policy
        self._words: list[SimpleQueue[dict[str, Any] | None]] = self._hub.told  # type: ignore[assignment]
        self.coordinator: CoordinatorThread | None = None
        self.processes = []
        for worker in range(workers):
            torch.manual_seed(1)
            process = FakeProcess(worker, make_net())
            process.optimizer = make_optimizer(process.net.parameters())
            named = [(name, one) for name, one in process.net.named_parameters() if one.requires_grad]
            buffers = [one for _, one in buffers_of(process.net)]
            layout = BucketLayout([one for _, one in named], buffers, workers, piece_bytes)
            steps = PartialSteps(process.optimizer)
            parts = (layout, self.gathering.of(worker), worker, steps)
            send = partial(self._said, worker)
            if policy is None:
                make = partial(FullSyncPlane, *parts, clip_norm=clip_norm, delay=delay, delay_at=delay_at)
                process.driver = FullSyncIterations(make, steps, None, send, 0, False)
                process.driver.plane._sits_out = partial(sits_out, worker)  # what a sampler would say
            else:
                plane = QuorumPlane(*parts, clip_norm=clip_norm)
                finishes_late = policy.late == "finish"
                process.driver = QuorumIterations(plane, steps, None, send, 0, finishes_late)
            process.driver.plane.on_version.append(partial(self._made, process, dict(named)))
            self._guard(process)
            self.processes.append(process)

    def _guard(self, process: FakeProcess) -> None:
        plane = process.driver.plane
        guard = Guard(process.net, plane.gate)
        takeover = Takeover(process.optimizer, process.driver.step, plane.synchronize)

        def let_go() -> None:
            takeover.give_back()
            process.driver.close()
            guard.remove()

        process.let_go = let_go  # type: ignore[attr-defined]

    def _made(self, process: FakeProcess, named: dict[str, Tensor], version: int, seconds: float) -> None:
        newest = process.driver.plane.newest()
        process.versions[version] = digest({name: newest[one] for name, one in named.items()})
        if process.worker == 0 and self.coordinator is not None:
            self.coordinator.version_made(version, seconds)

    def _said(self, worker: int, kind: str, **fields: Any) -> None:
        if kind in RELAYED:
            self._hub.broadcast({"kind": kind, **fields, "worker": worker})
        else:
            self._hub.say(worker, kind, **fields)

    def _listen(self, process: FakeProcess) -> None:
        while (message := self._words[process.worker].get()) is not None:
            self.gathering.dawdle(process.worker)
            process.driver.heard(message)

    def run(self, script: Callable[[FakeProcess], None]) -> World:
        """Run a script in every worker to its end."""
        if self._policy is not None:
            hub: Any = self._hub
            self.coordinator = CoordinatorThread(
                self._policy, len(self.processes), hub, decides=True, ledger=Ledger(None, 1)
            )
            self.coordinator.start()
        listeners = [
            threading.Thread(target=self._listen, args=(process,), name=f"listener-{process.worker}")
            for process in self.processes
        ]
        threads = [
            threading.Thread(target=self._play, args=(process, script), name=f"worker-{process.worker}", daemon=True)
            for process in self.processes
        ]
        for process in self.processes:
            process.driver.plane.start()
        for thread in (*listeners, *threads):
            thread.start()
        end = time.monotonic() + LONG_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        hangs = [thread.name for thread in threads if thread.is_alive()]
        if self.coordinator is not None:
            self.coordinator.close()
        for words in self._words:
            words.put(None)
        for listener in listeners:
            listener.join()
        for process in self.processes:
            if process.error is not None:
                raise process.error
        assert not hangs, f"these hang: {hangs}"
        return self

    def _play(self, process: FakeProcess, script: Callable[[FakeProcess], None]) -> None:
        try:
            script(process)
            process.driver.finish()
        except BaseException as error:
            process.error = error
            for other in self.processes:
                other.driver.plane.fail(QuorateError(f"worker {process.worker} failed: {error!r}"))
        finally:
            process.let_go()  # type: ignore[attr-defined]

    def check_identical(self) -> int:
        """Every version had the same parameters wherever it was made; gives how many there were."""
        first = self.processes[0].versions
        for process in self.processes[1:]:
            assert process.versions.keys() == first.keys()
            different = [version for version in first if process.versions[version] != first[version]]
            assert not different, f"worker {process.worker} differs from worker 0 at version {different[0]}"
        assert list(first) == list(range(1, len(first) + 1))
        for process in self.processes[1:]:
            for name, tensor in process.weights.items():
                assert torch.equal(tensor, self.processes[0].weights[name]), name
        return len(first)
