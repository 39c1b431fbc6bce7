"""One run of the Ray engine, from open to close."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import ray
from torch import Tensor

from quorate.checkpoint import CheckpointFolder
from quorate.engines._kept import finds_nan_early
from quorate.engines.base import Job
from quorate.engines.processes.live import LiveRun, Loss
from quorate.engines.ray.actors import Actors, end, who_is_there
from quorate.engines.ray.calling import ask, ask_all
from quorate.engines.ray.cluster import Demand, connect
from quorate.engines.ray.crew import Crew
from quorate.engines.ray.cutting import cut
from quorate.engines.ray.room import check_object_store, check_room
from quorate.engines.ray.setting import Cut, Setting, pack_state
from quorate.engines.ray.shipping import ship
from quorate.engines.ray.software import check_software
from quorate.engines.ray.updating import RoomForBlocks, Updater, Version
from quorate.engines.ray.writing import KeptByKeeper
from quorate.errors import BadInput, LearnerLost, QuorateError
from quorate.outfolder import load_parameters

if TYPE_CHECKING:
    from quorate.engines.ray.engine import Ray

_LOOK_UP_S = 0.2
#: How long workers that should fit are waited for before the run begins without them.
_LATE_S = 60.0
_TOO_LATE_S = 300.0
#: How long a shard that may be gone is given to answer.
_PING_S = 5.0
_TRIES = 3


class Opened:
    """The cluster, the actors and the books."""

    def __init__(self, engine: Ray, job: Job, to_close: ExitStack) -> None:
        assert job.task is not None
        self._engine, self._job = engine, job
        self.to_close = ExitStack()  # once open: what to give back at the end, last first
        to_close.enter_context(_no_words_on_what_is_dropped())
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
        setting = Setting(
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
        self._actors = Actors(self._cluster, ray.put(ship(job.task)), setting, demand, engine.shard_resources)
        to_close.callback(self._end_actors)
        # All of them load torch and the task at the same time; what follows needs them one after the other.
        self._keeper = self._actors.keeper()
        self._shards = self._actors.shards(engine.shards)
        self._early = [self._actors.worker(number) for number in range(engine.workers)]
        self._spare: Any = None
        self._leaving_at = 0.0
        self.has_average = job.learning.ema is not None

    # ------------------------------------------------------------ starting

    def start(self) -> None:
        """Wait until the workers that fit are there; time begins then."""
        engine, job = self._engine, self._job
        sizes = self._wait_for(self._keeper.describe.remote())
        self.parameter_bytes = sum(sizes)
        parts = cut(sizes, len(self._shards))
        for extra in self._shards[len(parts) :]:
            end(extra)
        self._shards = self._shards[: len(parts)]
        self._room = RoomForBlocks()
        first = self._room.take_version()
        begun = [shard.begin.remote(part, first) for shard, part in zip(self._shards, parts, strict=True)]
        segments = [self._begun(place, part, first, begun[place]) for place, part in enumerate(parts)]
        self.cut = Cut(tuple(parts), tuple(segments))
        self._check_object_store()
        self._keeper_shares = self._wait_for(self._keeper.begin.remote(self.cut))
        self.updater = Updater(job, self._room, self._shards, first, self._shard_is_gone)
        self.crew = Crew(
            engine.workers, self.updater, self._make_worker, self._cluster.draining, self._nodes, self._look_at
        )
        self.crew.cut, self.crew.give_back = self.cut, self._room.release
        self.live = LiveRun(
            job,
            engine.workers,
            self.crew,
            self._room,
            self.updater,
            latency=engine.latency,
            faults=engine.faults,
        )
        self.updater.shard_lives = [shard.live.remote() for shard in self._shards]
        self._make_spare()
        for number in range(engine.workers):
            self.crew.start(number)
        self.live.begin_time(sorted(self._gather()))

    def _gather(self) -> set[int]:
        """The workers that are there, once all that fit are."""
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
            for happening in self.crew.wait(_LOOK_UP_S):
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

    def _look_at(self, node: str) -> None:
        """Something was lost on this node: is it gone?"""
        if not self._cluster.answers(node):
            self._actors.gone.add(node)

    def _nodes(self) -> set[str]:
        return {node.id for node in self._cluster.nodes()}

    def _make_spare(self) -> None:
        """Where a shard can be lost, have one ready that takes its place."""
        if any(segment.node != self._cluster.driver_node for segment in self.cut.segments):
            self._spare = self._actors.spare_shard()

    def _check_object_store(self) -> None:
        """Versions and gradients that go between nodes are objects; those of one node need none."""
        if len(self._cluster.nodes()) < 2:
            return
        largest = max(segment.block_bytes for segment in self.cut.segments)
        whole = sum(segment.block_bytes for segment in self.cut.segments)
        versions = 2 if self._job.policy.staleness_bound == 0 else 2 + self._job.policy.history
        check_object_store(
            self._cluster,
            versions * whole + largest,
            f"{versions} versions of the model and a gradient under way",
        )

    def _stopped(self) -> bool:
        return self._job.stop is not None and self._job.stop.reason is not None

    def _wait_for(self, reference: Any) -> Any:
        """What an actor says, unless somebody wants the run to end first."""
        began = monotonic()
        while not ray.wait([reference], timeout=_LOOK_UP_S)[0]:
            if self._stopped():
                raise KeyboardInterrupt
            if monotonic() - began > max(_TOO_LATE_S, self._engine.wait_s):
                raise QuorateError(
                    f"the learner did not start within {monotonic() - began:.0f} s; has any node what "
                    f"shard_resources asks for ({self._engine.shard_resources})? `ray status` shows what is waited for"
                )
        return ask("an actor of the run", lambda: reference)

    def _begun(self, place: int, part: slice, first: int, begun: Any) -> Any:
        """Where the memory of a shard is, once it has begun; one whose node dies meanwhile is made again."""
        for _ in range(_TRIES):
            try:
                return _unless_bad(self._wait_for(begun))
            except LearnerLost as lost:
                why = lost
                self._shards[place] = self._actors.spare_shard()
                begun = self._shards[place].begin.remote(part, first)
        raise QuorateError(f"shard {place} of the learner cannot start, {_TRIES} times: {why}")

    def _end_actors(self) -> None:
        if hasattr(self, "crew"):
            self.crew.close()
        for actor in (*self._early, *self._shards, self._spare, self._keeper):
            end(actor)

    # ------------------------------------------------------------ the model

    def _ask_keeper(self, call: Callable[[Any], Any]) -> Any:
        """The keeper has no state of its own, so one that is gone is simply made again."""
        for last_try in (False, True):
            try:
                return ask("the keeper", lambda: call(self._keeper))
            except LearnerLost as error:
                if self._shard_is_gone():
                    raise
                if last_try:
                    raise QuorateError(f"the keeper of the run ends again and again: {error}") from error
                self._keeper = self._actors.keeper()
                self._wait_for(self._keeper.describe.remote())
                self._keeper_shares = self._wait_for(self._keeper.begin.remote(self.cut))
        raise AssertionError

    def _pieces(self, averaged: bool) -> list[Any]:
        """References to what the keeper cannot see by itself."""
        shares, updater = self._keeper_shares, self.updater
        pieces = [updater.piece(updater.newest, shard) for shard, shared in enumerate(shares) if not shared]
        return [*pieces, *(shard.averaged.remote() for shard in updater.shards)] if averaged else pieces

    def evaluate(self) -> Any:
        newest, pieces = self.updater.newest, self._pieces(self.has_average)
        version, block = newest.number, newest.block
        return self._ask_keeper(lambda keeper: keeper.evaluate.remote(version, block, self.has_average, *pieces))

    def digest(self) -> Any:
        pieces = self._pieces(False)
        return self._ask_keeper(lambda keeper: keeper.digest.remote(self.updater.newest.block, *pieces))

    def write_parameters(self, path: Path, averaged: bool) -> list[str]:
        """Into a file; gives the names in the model's order, which the file does not keep."""
        pieces, block = self._pieces(averaged), self.updater.newest.block
        names: list[str] = self._ask_keeper(
            lambda keeper: keeper.write.remote(str(path.resolve()), block, averaged, *pieces)
        )
        return names

    def parameters(self, averaged: bool) -> dict[str, Tensor]:
        """In a file that is mapped: it takes memory of this process only where it is looked at."""
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
        """References to what the shards have, for `checkpoint_writer`; older versions by their numbers."""
        older = [(version.number, version.block) for version in self.updater.older]
        return {
            "steps": list(self.live.steps),
            "older": [number for number, _ in older],
            "shards": [shard.state.remote(self.updater.newest.number, older) for shard in self.updater.shards],
        }

    def check_can_save(self) -> None:
        """Refuse what no checkpoint can hold; the shards look themselves."""
        for said in ask_all("the learner", [shard.check_can_save.remote for shard in self.updater.shards]):
            _unless_bad(said)

    def checkpoint_writer(self, folder: CheckpointFolder, on_failure: Callable[[str], None]) -> KeptByKeeper:
        return KeptByKeeper(lambda: self._keeper, folder, on_failure)

    def restore(self, state: dict[str, Any], time: float) -> None:
        """Continue from a state: at the beginning, or after a shard was lost."""
        states = state["shards"]
        if len(states) != len(self._shards):
            raise BadInput(
                f"the checkpoint is of a model in {len(states)} shards, but this run has {len(self._shards)}; "
                f"give shards={len(states)} (--shards {len(states)})"
            )
        self.updater.forget_all()
        over = self.crew.forget_orders()
        self._mend()
        for happening in self.crew.take_untold():
            over += happening.orders if isinstance(happening, Loss) else []
        for order in over:
            self._room.release(order.version)
            self._room.release(order.gradient)
        for version in (*self.updater.older, self.updater.newest):
            self._room.release(version)
        self.updater.older.clear()
        nothing = [None] * len(states)
        for number in state["older"]:
            self.updater.older.append(Version(number, self._room.take_version(), list(nothing)))
        newest = Version(states[0]["learner"]["version"], self._room.take_version(), list(nothing))
        self.updater.newest = newest
        older = [version.block for version in self.updater.older]
        references = [ray.put(pack_state(one)) for one in states]
        calls = [
            partial(shard.restore.remote, reference, newest.block, older)
            for shard, reference in zip(self.updater.shards, references, strict=True)
        ]
        for said in ask_all("a shard of the learner", calls):
            _unless_bad(said)
        self.live.steps[:] = state["steps"]
        self.live.start_over([seat.number for seat in self.crew.seats if seat.ready is not None], time)

    # ------------------------------------------------------------ shards that are lost or about to be

    def shard_leaves(self) -> bool:
        """Whether the node of a shard has announced its end."""
        now = monotonic()
        if now < self._leaving_at:
            return False
        self._leaving_at = now + 1.0
        leaving = self._cluster.draining()
        return any(segment.node in leaving for segment in self.cut.segments)

    def _shard_is_gone(self) -> bool:
        return not all(self._cluster.answers(segment.node) for segment in self.cut.segments)

    def _mend(self) -> None:
        """New shards for those that are gone or about to go, and tell everybody where they are."""
        leaving = self._cluster.draining()
        segments = list(self.cut.segments)
        changed = False
        stays = [one.node not in leaving and self._cluster.answers(one.node) for one in segments]
        waited_for = [shard for shard, stay in zip(self._shards, stays, strict=True) if stay]
        there = iter(who_is_there(waited_for, _PING_S))
        for place, shard in enumerate(self._shards):
            if stays[place] and next(there):
                continue
            changed = True
            end(shard)
            self._look_at(segments[place].node)
            fresh, self._spare = self._spare or self._actors.spare_shard(), None
            self._shards[place] = fresh
            part = self.cut.parts[place]
            segments[place] = self._begun(place, part, 0, fresh.begin.remote(part, 0))
        if changed:
            self.cut = Cut(self.cut.parts, tuple(segments))
            self._make_spare()
            self._keeper_shares = self._ask_keeper(lambda keeper: keeper.attach.remote(self.cut))
        self.updater.shard_lives = [shard.live.remote() for shard in self._shards]
        self.crew.move_to(self.cut, self._cluster.answers)

    # ------------------------------------------------------------ for tests and for the curious

    def processes(self) -> dict[int, int]:
        """The process number of each worker that is there, on its own node."""
        return {seat.number: seat.ready.pid for seat in self.crew.seats if seat.ready is not None}


@contextmanager
def _no_words_on_what_is_dropped() -> Iterator[None]:
    """Gradients of workers that are lost are dropped unseen, and Ray would print a page for each."""
    before = os.environ.get("RAY_IGNORE_UNHANDLED_ERRORS")
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("RAY_IGNORE_UNHANDLED_ERRORS", None)
        else:
            os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = before


def _unless_bad(said: Any) -> Any:
    if isinstance(said, BadInput):
        raise said
    return said
