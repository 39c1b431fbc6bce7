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

from quorate.data_parallel.buckets import BucketLayout
from quorate.data_parallel.control.hub import RELAYED
from quorate.data_parallel.coordinator_thread import CoordinatorThread
from quorate.data_parallel.full_sync import FullSyncPlane
from quorate.data_parallel.gradient_hooks import buffers_of
from quorate.data_parallel.iterations import FullSyncIterations, Iterations, QuorumIterations
from quorate.data_parallel.lazy_tensors import Guard
from quorate.data_parallel.module import Takeover
from quorate.data_parallel.optimizer_steps import PartialSteps
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


class Seat:
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
    """Workers in threads, each with its data plane; under a quorum with a judge of their own.

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
        self.judge: CoordinatorThread | None = None
        self.seats = []
        for worker in range(workers):
            torch.manual_seed(1)
            seat = Seat(worker, make_net())
            seat.optimizer = make_optimizer(seat.net.parameters())
            named = [(name, one) for name, one in seat.net.named_parameters() if one.requires_grad]
            buffers = [one for _, one in buffers_of(seat.net)]
            layout = BucketLayout([one for _, one in named], buffers, workers, piece_bytes)
            steps = PartialSteps(seat.optimizer)
            parts = (layout, self.gathering.of(worker), worker, steps)
            send = partial(self._said, worker)
            if policy is None:
                make = partial(FullSyncPlane, *parts, clip_norm=clip_norm, delay=delay, delay_at=delay_at)
                seat.driver = FullSyncIterations(make, steps, None, send, 0, False)
                seat.driver.plane._sits_out = partial(sits_out, worker)  # what a sampler would say
            else:
                plane = QuorumPlane(*parts, clip_norm=clip_norm)
                finishes_late = getattr(policy, "late", "cancel") == "finish"
                seat.driver = QuorumIterations(plane, steps, None, send, 0, finishes_late)
            seat.driver.plane.on_version = partial(self._made, seat, dict(named))
            self._guard(seat)
            self.seats.append(seat)

    def _guard(self, seat: Seat) -> None:
        plane = seat.driver.plane
        guard = Guard(seat.net, plane.gate)
        takeover = Takeover(seat.optimizer, seat.driver.step, plane.synchronize)

        def let_go() -> None:
            takeover.give_back()
            seat.driver.close()
            guard.remove()

        seat.let_go = let_go  # type: ignore[attr-defined]

    def _made(self, seat: Seat, named: dict[str, Tensor], version: int, seconds: float) -> None:
        newest = seat.driver.plane.newest()
        seat.versions[version] = digest({name: newest[one] for name, one in named.items()})
        if seat.worker == 0 and self.judge is not None:
            self.judge.version_made(version, seconds)

    def _said(self, worker: int, kind: str, **fields: Any) -> None:
        if kind in RELAYED:
            self._hub.broadcast({"kind": kind, **fields, "worker": worker})
        else:
            self._hub.say(worker, kind, **fields)

    def _listen(self, seat: Seat) -> None:
        while (message := self._words[seat.worker].get()) is not None:
            self.gathering.dawdle(seat.worker)
            seat.driver.heard(message)

    def run(self, script: Callable[[Seat], None]) -> World:
        """Run a script in every worker to its end."""
        if self._policy is not None:
            hub: Any = self._hub
            self.judge = CoordinatorThread(self._policy, len(self.seats), hub, decides=True, ledger=Ledger(None, 1))
            self.judge.start()
        ears = [threading.Thread(target=self._listen, args=(seat,), name=f"ear-{seat.worker}") for seat in self.seats]
        threads = [
            threading.Thread(target=self._play, args=(seat, script), name=f"worker-{seat.worker}", daemon=True)
            for seat in self.seats
        ]
        for seat in self.seats:
            seat.driver.plane.start()
        for thread in (*ears, *threads):
            thread.start()
        end = time.monotonic() + LONG_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        hangs = [thread.name for thread in threads if thread.is_alive()]
        if self.judge is not None:
            self.judge.close()
        for words in self._words:
            words.put(None)
        for ear in ears:
            ear.join()
        for seat in self.seats:
            if seat.error is not None:
                raise seat.error
        assert not hangs, f"these hang: {hangs}"
        return self

    def _play(self, seat: Seat, script: Callable[[Seat], None]) -> None:
        try:
            script(seat)
            seat.driver.finish()
        except BaseException as error:
            seat.error = error
            for other in self.seats:
                other.driver.plane.fail(QuorateError(f"worker {seat.worker} failed: {error!r}"))
        finally:
            seat.let_go()  # type: ignore[attr-defined]

    def check_identical(self) -> int:
        """Every version had the same parameters wherever it was made; gives how many there were."""
        first = self.seats[0].versions
        for seat in self.seats[1:]:
            assert seat.versions.keys() == first.keys()
            different = [version for version in first if seat.versions[version] != first[version]]
            assert not different, f"worker {seat.worker} differs from worker 0 at version {different[0]}"
        assert list(first) == list(range(1, len(first) + 1))
        for seat in self.seats[1:]:
            for name, tensor in seat.weights.items():
                assert torch.equal(tensor, self.seats[0].weights[name]), name
        return len(first)
