"""One run of the Ray engine, from open to close."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError
from torch import Tensor

from quorate.checkpoint import CheckpointFolder
from quorate.engines.base import Job
from quorate.engines.ray.actors import Actors, ask, ask_all, end, original, which_answer
from quorate.engines.ray.cluster import Demand, check_object_store, check_room, check_software
from quorate.engines.ray.connection import connect
from quorate.engines.ray.security import changed_environment
from quorate.engines.ray.session import first_line
from quorate.engines.ray.shard import cut
from quorate.engines.ray.task_transfer import pack_task
from quorate.engines.ray.transport import ActorConfig, Cut, pack_state
from quorate.engines.ray.versions import RayVersions, RoomForBlocks, Version
from quorate.engines.ray.workers import RayWorkers
from quorate.engines.shared.order_book import Loss
from quorate.engines.shared.real_time import LiveRun
from quorate.engines.shared.update import finds_nan_early
from quorate.errors import BadInput, LearnerLost, QuorateError
from quorate.out_folder import load_parameters

if TYPE_CHECKING:
    from quorate.engines.ray.engine import Ray


_POLL_S = 0.2
#: The run starts without workers that should fit but are not ready after this time, if the quorum is.
_LATE_S = 60.0
_TOO_LATE_S = 300.0
#: Timeout of a ping to a shard that may be gone.
_PING_S = 5.0
_TRIES = 3
_LOST_CHECKPOINTS_ALLOWED = 3


class RayRun:
    """An open run: the cluster, its actors, and the driver's bookkeeping."""

    def __init__(self, engine: Ray, job: Job, to_close: ExitStack) -> None:
        assert job.task is not None
        self._engine, self._job = engine, job
        self.to_close = ExitStack()  # cleanup at the end of an open run
        # Otherwise Ray prints a page for every gradient of a lost worker, which is dropped without being read.
        to_close.enter_context(changed_environment(RAY_IGNORE_UNHANDLED_ERRORS="1"))
        demand = Demand(engine.cpus, engine.gpus, engine.resources)
        self._cluster = connect(
            address=engine.address,
            workers=engine.workers,
            demand=demand,
            runtime_env=engine.runtime_env,
            working_dir=engine.working_dir,
            extra={name: amount * (engine.shards or 1) for name, amount in (engine.shard_resources or {}).items()},
        )
        to_close.callback(self._cluster.close)
        check_software(self._cluster)
        needed = job.policy.begin(engine.workers).needed
        self._room_for = check_room(self._cluster, demand, engine.workers, needed, engine.wait_s, self._stopped)
        self._needed = needed
        config = ActorConfig(
            seed=job.seed,
            threads=engine.threads,
            wire=engine.wire,
            device=engine.device,
            batch_size=job.ledger.batch_size,
            samples=job.ledger.samples,
            learning=job.learning,
            look_through=finds_nan_early(job.policy),
            argv=tuple(sys.argv),
        )
        self._actors = Actors(self._cluster, ray.put(pack_task(job.task)), config, demand, engine.shard_resources)
        to_close.callback(self._end_actors)
        # All actors are created now, so that they load torch and the task in parallel.
        self._evaluator, self._evaluator_hangs = self._actors.evaluator(), False
        self._shards = self._actors.shards(engine.shards)
        self._early = [self._actors.worker(number) for number in range(engine.workers)]
        self._spare: Any = None
        self._leaving_at = 0.0
        self.has_average = job.learning.ema is not None

    # ------------------------------------------------------------ starting

    def start(self) -> None:
        """Wait until the workers that fit are ready; the clock starts then."""
        engine, job = self._engine, self._job
        sizes = self._wait_for(self._evaluator.describe.remote())
        self.parameter_bytes = sum(sizes)
        parts = cut(sizes, len(self._shards))
        for extra in self._shards[len(parts) :]:
            end(extra)
        self._shards = self._shards[: len(parts)]
        self._room = RoomForBlocks()
        first = self._room.take_version()
        begun = [shard.begin.remote(part, first) for shard, part in zip(self._shards, parts, strict=True)]
        segments = [self._begun(number, part, first, begun[number]) for number, part in enumerate(parts)]
        self.cut = Cut(tuple(parts), tuple(segments))
        self._check_object_store()
        self._evaluator_shares = self._wait_for(self._evaluator.begin.remote(self.cut))
        self.updater = RayVersions(job, self._room, self._shards, first, self._shard_is_gone)
        room, updater = self._room, self.updater
        self.workers = RayWorkers(
            engine.workers, updater, room, self._cluster, self.cut, self._make_worker, self._check_node, job.patience_s
        )
        self.live = LiveRun(
            job, engine.workers, self.workers, room, updater, latency=engine.latency, faults=engine.faults
        )
        self.updater.shard_lives = [shard.live.remote() for shard in self._shards]
        self._make_spare()
        for number in range(engine.workers):
            self.workers.start(number)
        self.live.begin_time(sorted(self._gather()))

    def _gather(self) -> set[int]:
        """Wait for the workers that fit; returns the ready ones."""
        ready: set[int] = set()
        began = monotonic()
        while len(ready) < self._room_for:
            if self._stopped():
                raise KeyboardInterrupt
            waited_s = monotonic() - began
            if waited_s > max(_TOO_LATE_S, self._engine.wait_s):
                raise QuorateError(
                    f"only {len(ready)} of the {self._needed} workers that the quorum needs got ready within "
                    f"{waited_s:.0f} s; `ray status` and the logs of the actors say what they wait for"
                )
            for happening in self.workers.wait(_POLL_S):
                if isinstance(happening, int):
                    ready.add(happening)
                elif not isinstance(happening, tuple):
                    ready.discard(happening.worker)
            if len(ready) >= self._needed and waited_s > _LATE_S:
                break
        return ready

    def _make_worker(self, number: int) -> tuple[Any, Any]:
        actor, self._early[number] = self._early[number] or self._actors.worker(number), None
        return actor, actor.begin.remote(self.cut)

    def _check_node(self, node: str) -> None:
        """Remember a node that lost an actor and does not answer: new workers avoid it."""
        if not self._cluster.answers(node):
            self._actors.gone.add(node)

    def _make_spare(self) -> None:
        """Keep a spare shard ready if a shard is on another node and so can be lost."""
        if any(segment.node != self._cluster.driver_node for segment in self.cut.segments):
            self._spare = self._actors.spare_shard()

    def _check_object_store(self) -> None:
        """Versions and gradients that travel between nodes are objects in the store; on one node there are none."""
        if len(self._cluster.nodes()) < 2:
            return
        largest = max(segment.block_bytes for segment in self.cut.segments)
        whole = sum(segment.block_bytes for segment in self.cut.segments)
        versions = 2 if self._job.policy.staleness_bound == 0 else 2 + self._job.policy.history
        what = f"{versions} versions of the model and a gradient under way"
        check_object_store(self._cluster, versions * whole + largest, what)

    def _stopped(self) -> bool:
        return self._job.stop is not None and self._job.stop.reason is not None

    def _wait_for(self, reference: Any) -> Any:
        """The result of an actor call; KeyboardInterrupt if the run is stopped first."""
        began = monotonic()
        while not ray.wait([reference], timeout=_POLL_S)[0]:
            if self._stopped():
                raise KeyboardInterrupt
            if monotonic() - began > max(_TOO_LATE_S, self._engine.wait_s):
                raise QuorateError(
                    f"the learner did not start within {monotonic() - began:.0f} s; has any node what "
                    f"shard_resources asks for ({self._engine.shard_resources})? `ray status` shows what is waited for"
                )
        return ask("an actor of the run", lambda: reference)

    def _begun(self, number: int, part: slice, first: int, begun: Any) -> Any:
        """The memory address of a shard that has begun; if its node dies meanwhile, the shard is made again."""
        for _ in range(_TRIES):
            try:
                return _unless_bad(self._wait_for(begun))
            except LearnerLost as lost:
                why = lost
                self._shards[number] = self._actors.spare_shard()
                begun = self._shards[number].begin.remote(part, first)
        raise QuorateError(f"shard {number} of the learner cannot start, {_TRIES} times: {why}")

    def _end_actors(self) -> None:
        if hasattr(self, "workers"):
            self.workers.close()
        for actor in (*self._early, *self._shards, self._spare, self._evaluator):
            end(actor)

    # ------------------------------------------------------------ the model

    def _ask_evaluator(self, call: Callable[[Any], Any]) -> Any:
        """Call the evaluator. It has no state of its own, so a lost one is simply replaced."""
        for last_try in (False, True):
            try:
                return ask("the evaluator", lambda: call(self._evaluator))
            except LearnerLost as error:
                if self._shard_is_gone():
                    raise
                if last_try:
                    raise QuorateError(f"the evaluator ends again and again: {error}") from error
                self._replace_evaluator()
        raise AssertionError

    def _replace_evaluator(self) -> None:
        self._evaluator, self._evaluator_hangs = self._actors.evaluator(), False
        # Not _wait_for, which gives up when the run is stopped: the last checkpoint needs the evaluator.
        ask("the evaluator", self._evaluator.describe.remote)
        self._evaluator_shares = ask("the evaluator", lambda: self._evaluator.begin.remote(self.cut))

    def _working_evaluator(self) -> Any:
        if self._evaluator_hangs:
            ray.kill(self._evaluator)
            self._replace_evaluator()
        return self._evaluator

    def _pieces(self, averaged: bool) -> list[Any]:
        """References to the parts of the newest version whose memory the evaluator does not share, and averages."""
        shares, updater = self._evaluator_shares, self.updater
        pieces = [updater.piece(updater.newest, shard) for shard, shared in enumerate(shares) if not shared]
        return [*pieces, *(shard.averaged.remote() for shard in updater.shards)] if averaged else pieces

    def evaluate(self) -> Any:
        newest, pieces = self.updater.newest, self._pieces(self.has_average)
        version, block = newest.number, newest.block
        try:
            return self._ask_evaluator(
                lambda evaluator: evaluator.evaluate.remote(version, block, self.has_average, *pieces)
            )
        except KeyboardInterrupt:  # the evaluator is still busy and could not write the last checkpoint
            self._evaluator_hangs = True
            raise

    def digest(self) -> Any:
        pieces = self._pieces(False)
        return self._ask_evaluator(lambda evaluator: evaluator.digest.remote(self.updater.newest.block, *pieces))

    def write_parameters(self, path: Path, averaged: bool) -> list[str]:
        """Write a file; returns the names in the model's order, which the file does not keep."""
        pieces, block = self._pieces(averaged), self.updater.newest.block
        names: list[str] = self._ask_evaluator(
            lambda evaluator: evaluator.write.remote(str(path.resolve()), block, averaged, *pieces)
        )
        return names

    def parameters(self, averaged: bool) -> dict[str, Tensor]:
        """Tensors in a mapped file, which take memory of this process only when they are read."""
        descriptor, name = tempfile.mkstemp(prefix="quorate-", suffix=".safetensors")
        os.close(descriptor)
        path = Path(name)
        try:
            names = self.write_parameters(path, averaged)
            found = load_parameters(path)
            return {name: found[name] for name in names}
        finally:
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """The state for `checkpoint_writer`: references to the shards' states, and the numbers of older versions."""
        older = [(version.number, version.block) for version in self.updater.older]
        return {
            "steps": list(self.live.steps),
            "older": [number for number, _ in older],
            "shards": [shard.state.remote(self.updater.newest.number, older) for shard in self.updater.shards],
        }

    def check_can_save(self) -> None:
        """Ask every shard; BadInput if no checkpoint can hold its state."""
        for answer in ask_all("the learner", [shard.check_can_save.remote for shard in self.updater.shards]):
            _unless_bad(answer)

    def checkpoint_writer(self, folder: CheckpointFolder, on_failure: Callable[[str], None]) -> CheckpointsByEvaluator:
        return CheckpointsByEvaluator(self._working_evaluator, folder, on_failure)

    def restore(self, state: dict[str, Any], time: float) -> None:
        """Continue from a state: at the start of a resumed run, or after a shard was lost."""
        self._cluster.check_raylet()
        states = state["shards"]
        if len(states) != len(self._shards):
            raise BadInput(
                f"the checkpoint is of a model in {len(states)} shards, but this run has {len(self._shards)}; "
                f"give shards={len(states)} (--shards {len(states)})"
            )
        self.updater.forget_all()
        over = self.workers.forget_orders()
        self._replace_lost_shards()
        for happening in self.workers.take_happened():
            over += happening.orders if isinstance(happening, Loss) else []
        for order in over:
            self._room.release(order.version)
            self._room.release(order.gradient)
        for version in (*self.updater.older, self.updater.newest):
            self._room.release(version)
        self.updater.older.clear()
        for number in state["older"]:
            self.updater.older.append(Version(number, self._room.take_version(), [None] * len(states)))
        newest = Version(states[0]["learner"]["version"], self._room.take_version(), [None] * len(states))
        self.updater.newest = newest
        older = [version.block for version in self.updater.older]
        references = [ray.put(pack_state(one)) for one in states]
        calls = [
            partial(shard.restore.remote, reference, newest.block, older)
            for shard, reference in zip(self.updater.shards, references, strict=True)
        ]
        for answer in ask_all("a shard of the learner", calls):
            _unless_bad(answer)
        self.live.steps[:] = state["steps"]
        self.live.start_over([record.number for record in self.workers.records if record.ready is not None], time)

    # ------------------------------------------------------------ lost and leaving shards

    def shard_leaves(self) -> bool:
        """Whether the node of a shard has announced its end; asks the cluster at most once a second."""
        now = monotonic()
        if now < self._leaving_at:
            return False
        self._leaving_at = now + 1.0
        leaving = self._cluster.draining()
        return any(segment.node in leaving for segment in self.cut.segments)

    def _shard_is_gone(self) -> bool:
        return not all(self._cluster.answers(segment.node) for segment in self.cut.segments)

    def _replace_lost_shards(self) -> None:
        """Replace shards that are gone or on leaving nodes, and attach evaluator and workers to the new ones."""
        leaving = self._cluster.draining()
        segments = list(self.cut.segments)
        changed = False
        stays = [one.node not in leaving and self._cluster.answers(one.node) for one in segments]
        answers = iter(which_answer([shard for shard, stay in zip(self._shards, stays, strict=True) if stay], _PING_S))
        for number, shard in enumerate(self._shards):
            if stays[number] and next(answers):
                continue
            changed = True
            end(shard)
            self._check_node(segments[number].node)
            fresh, self._spare = self._spare or self._actors.spare_shard(), None
            self._shards[number] = fresh
            part = self.cut.parts[number]
            segments[number] = self._begun(number, part, 0, fresh.begin.remote(part, 0))
        if changed:
            self.cut = Cut(self.cut.parts, tuple(segments))
            self._make_spare()
            self._evaluator_shares = self._ask_evaluator(lambda evaluator: evaluator.attach.remote(self.cut))
        self.updater.shard_lives = [shard.live.remote() for shard in self._shards]
        self.workers.move_to(self.cut)


def _unless_bad(answer: Any) -> Any:
    """Raise a BadInput that a shard has returned."""
    if isinstance(answer, BadInput):
        raise answer
    return answer


class CheckpointsByEvaluator:
    """Lets the evaluator write one checkpoint at a time, while training goes on."""

    def __init__(
        self, evaluator: Callable[[], Any], folder: CheckpointFolder, on_failure: Callable[[str], None]
    ) -> None:
        self._evaluator, self._folder, self._on_failure = evaluator, folder, on_failure
        self._writing: Any = None
        self._lost_in_a_row = 0

    @property
    def busy(self) -> bool:
        return self._writing is not None and not ray.wait([self._writing], timeout=0)[0]

    def submit(self, version: int, state: dict[str, Any]) -> None:
        """Start to write a checkpoint of a state from `Ray.state`."""
        assert not self.busy, "one checkpoint at a time"
        self.finish()
        try:
            self._folder.prepare()
        except OSError as fault:
            self._on_failure(f"no checkpoint of version {version}: the trace cannot be written ({fault.strerror})")
            return
        engine = dict(state["engine"])
        shards = engine.pop("shards")
        rest = {name: value for name, value in state.items() if name != "engine"}
        run = str(self._folder.folder.parent.resolve())
        self._writing = self._evaluator().save.remote(run, version, rest, engine, *shards)

    def finish(self) -> None:
        """Wait for the checkpoint being written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            sentence = ray.get(writing)
        except RayError as error:
            cause = original(error)
            if not isinstance(cause, RayError):
                raise cause from error
            # A lost evaluator is replaced at its next call. A lost shard is noticed by the next update.
            self._lost_in_a_row += 1
            if self._lost_in_a_row < _LOST_CHECKPOINTS_ALLOWED:
                return
            sentence = f"the last {self._lost_in_a_row} checkpoints could not be written: {first_line(error)}"
        else:
            self._lost_in_a_row = 0
        if sentence is not None:
            self._on_failure(sentence)
