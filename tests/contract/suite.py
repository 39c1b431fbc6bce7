"""What every engine must do, whatever it runs on.

`EngineContract` is for all engines: a subclass says how to make a run. `ModelContract` is for engines that hold the
model, which `quorate.train` runs: a subclass says how to make the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import quorate
from quorate.engines.base import Engine
from quorate.learner import digest
from quorate.metrics import metrics_of
from quorate.trace import Recorder
from tests.contract.case import WORKERS, Case
from tests.laws.checker import LawChecker
from tests.own_policies import OWN
from tests.toy_tasks import Broken, Toy, batch_norm_net, plain_loop, sgd_of_others, sgd_partly_of_others

POLICIES = [
    quorate.FullSync(),
    quorate.BackupSync(3, 1),
    quorate.BackupSync(2, 2, late="finish"),
    quorate.Async(),
    quorate.Async(max_staleness=2),
    quorate.SoftSync(3, staleness_weights=True),
    quorate.BoundedStaleness(1),
    quorate.KBatchSync(5),
    quorate.Delayed(2),
    quorate.Deadline(),
    quorate.Deadline(limit=1.2, min_quorum=2, late="finish"),
    quorate.AdaptiveBackup(),
    quorate.AdaptiveBackup(noise_scale=20.0, min_quorum=2, explore=0.5, late="finish"),
]


class EngineContract(ABC):
    """Inherit, implement `run`, and every test below runs on it."""

    #: The policies that the engine runs.
    policies: ClassVar[Sequence[quorate.Policy]] = (*POLICIES, *OWN)
    #: Whether a replay computes the gradients again; otherwise it only makes the decisions again.
    replays_gradients: ClassVar[bool]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "policy" in metafunc.fixturenames:
            metafunc.parametrize("policy", self.policies, ids=repr)

    @abstractmethod
    def run(self, case: Case, recorder: Recorder | None = None) -> dict[str, Any]:
        """Make a run on workers that take different times; gives its summary. The recorder is told every event."""

    def test_the_laws_hold(self, policy: quorate.Policy, tmp_path: Path) -> None:
        checker = LawChecker(policy, WORKERS, batches=13, epochs=3)
        summary = self.run(Case(policy=policy, out=tmp_path / "run", epochs=3), checker)
        assert summary["samples"] == {"applied": 300, "distinct": 100}

    def test_a_replay_makes_the_same_decisions_and_parameters(self, policy: quorate.Policy, tmp_path: Path) -> None:
        """Law 7: two engines given the same arrivals; here the second is the recording."""
        self.run(Case(policy=policy, out=tmp_path / "run", epochs=2, make=batch_norm_net))
        replayed = quorate.replay(tmp_path / "run", Toy(batch_norm_net) if self.replays_gradients else None)
        assert replayed.gradients == self.replays_gradients
        assert replayed.result.digest == metrics_of(tmp_path / "run").digest
        assert (replayed.result.digest is not None) == self.replays_gradients
        assert replayed.lines > 50

    def test_metrics_of_the_trace_are_those_of_the_run(self, tmp_path: Path) -> None:
        summary = self.run(Case(policy=quorate.BackupSync(3, 1), out=tmp_path / "run", epochs=2))
        assert metrics_of(tmp_path / "run").summary() == summary

    def test_it_ends_at_its_updates_with_every_ticket_ended(self, tmp_path: Path) -> None:
        summary = self.run(Case(policy=quorate.BackupSync(2, 2), out=tmp_path / "run", updates=7))
        tickets = summary["tickets"]
        assert summary["updates"] == 7
        assert tickets["applied"] == 14
        assert tickets["reasons"].get("the run is over", 0) <= WORKERS

    def test_a_policy_for_other_workers_is_refused_before_anything_starts(self, tmp_path: Path) -> None:
        with pytest.raises(quorate.BadInput, match="quorum is 9"):
            self.run(Case(policy=quorate.BackupSync(9), out=tmp_path / "run", updates=1))
        assert not (tmp_path / "run").exists()


class ModelContract(EngineContract):
    """Inherit, implement `engine`, and every test runs on it."""

    replays_gradients = True

    @abstractmethod
    def engine(self, workers: int) -> Engine:
        """An engine whose workers take different times, so that there is something to decide."""

    def run(self, case: Case, recorder: Recorder | None = None) -> dict[str, Any]:
        result = quorate.train(
            Toy(case.make),
            case.policy,
            self.engine(WORKERS),
            epochs=case.epochs,
            updates=case.updates,
            out=case.out,
            recorders=() if recorder is None else (recorder,),
        )
        assert result.digest == digest(result.parameters)
        return result.summary

    def test_one_worker_is_a_plain_loop(self) -> None:
        task = Toy(batch_norm_net)
        result = quorate.train(task, quorate.FullSync(), self.engine(1), updates=30, seed=4)
        theirs = plain_loop(task, 30, seed=4)
        assert all(torch.equal(result.parameters[name], theirs[name]) for name in theirs)

    @pytest.mark.parametrize("optimizer", [sgd_of_others, sgd_partly_of_others])
    def test_an_optimizer_of_other_parameters_is_refused(self, tmp_path: Path, optimizer: Any) -> None:
        task = Toy(optimizer=optimizer)
        with pytest.raises(quorate.BadInput, match=r"the optimizer has 2 parameters that optimizer\(\) was not given"):
            quorate.train(task, quorate.FullSync(), self.engine(WORKERS), updates=2, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_closing_twice_does_no_harm(self) -> None:
        engine = self.engine(WORKERS)
        quorate.train(Toy(), quorate.FullSync(), engine, updates=2)
        engine.close()

    def test_an_engine_can_be_used_again(self) -> None:
        engine = self.engine(WORKERS)
        first = quorate.train(Toy(), quorate.FullSync(), engine, updates=5)
        second = quorate.train(Toy(), quorate.FullSync(), engine, updates=5)
        assert first.summary["samples"] == second.summary["samples"]

    def test_an_error_in_the_task_comes_through(self) -> None:
        """As it is, or with its traceback in the words of an engine whose workers are elsewhere."""
        with pytest.raises((ZeroDivisionError, quorate.WorkerFailed), match="in the user's loss"):
            quorate.train(Broken(), quorate.FullSync(), self.engine(WORKERS), updates=2)
