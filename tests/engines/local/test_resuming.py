"""A run that was broken off and resumed is the run that was not: with one worker, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import quorate
from tests.engines.local.checking import Watch, versions_saved
from tests.laws.checker import LawChecker
from tests.toy_tasks import Toy, batch_norm_net, plain_sgd, sgd

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.timeout(60)]


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def amsgrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, amsgrad=True, weight_decay=0.1)


def rmsprop(params: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.005, momentum=0.5, centered=True)


def two_groups(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.Adagrad([{"params": params[:2], "lr": 0.1}, {"params": params[2:]}], lr=0.01)


def steps(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 7, gamma=0.5)


def one_cycle(optimizer: Any) -> Any:
    """Changes the momentum too."""
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)


def warmup_then_cosine(optimizer: Any) -> Any:
    first, then = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(optimizer, 40)
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[5])


class Stopped(Exception):  # noqa: N818
    """The end of a life, in the same process: quicker than a kill, and as sudden for the run."""


def stop_at(version: int) -> Callable[[quorate.Progress], None]:
    def on_progress(progress: quorate.Progress) -> None:
        if progress.updates == version:
            raise Stopped

    return on_progress


class Scheduled(Toy):
    """Its loss counts on nothing but the batch and the random numbers that belong to it."""

    def __init__(self, optimizer: Any, schedule: Any = None) -> None:
        super().__init__(dropout_net, optimizer, schedule=schedule)


CASES: dict[str, tuple[Toy, quorate.Policy, dict[str, float]]] = {
    "plain SGD": (Scheduled(plain_sgd, steps), quorate.FullSync(), {}),
    "momentum, one cycle": (Scheduled(sgd, one_cycle), quorate.FullSync(), {"ema": 0.8}),
    "AMSGrad, sequence": (Scheduled(amsgrad, warmup_then_cosine), quorate.Async(), {"clip_norm": 0.5}),
    "RMSprop": (Scheduled(rmsprop), quorate.KBatchSync(3), {"ema": 0.5, "clip_norm": 1.0}),
    "two groups": (Scheduled(two_groups, steps), quorate.SoftSync(2), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_one_worker_resumed_is_one_worker_undisturbed(tmp_path: Path, name: str) -> None:
    task, policy, learning = CASES[name]
    whole = quorate.train(task, policy, quorate.Local(1), updates=30, **learning, seed=3)
    with pytest.raises(Stopped):
        quorate.train(
            task,
            policy,
            quorate.Local(1),
            updates=30,
            out=tmp_path / "run",
            **learning,
            seed=3,
            checkpoint_every=4,
            on_progress=stop_at(15),
        )
    with pytest.raises(Stopped):  # and once more, before the first checkpoint of its second life
        quorate.resume(tmp_path / "run", task, checkpoint_every=40, on_progress=stop_at(18))
    resumed = quorate.resume(tmp_path / "run", task, checkpoint_every=4)
    assert resumed.summary["updates"] == 30
    assert resumed.digest == whole.digest
    assert (resumed.averaged is None) == (whole.averaged is None)
    for mine, theirs in zip((resumed.averaged or {}).values(), (whole.averaged or {}).values(), strict=True):
        assert torch.equal(mine, theirs)
    assert resumed.evaluation == whole.evaluation
    assert quorate.replay(tmp_path / "run", task).result.digest == whole.digest


POLICIES = [
    quorate.FullSync(),
    quorate.BackupSync(2, 1),
    quorate.BackupSync(2, 1, late="finish"),
    quorate.Async(),
    quorate.Async(max_staleness=2),
    quorate.SoftSync(2, staleness_weights=True),
    quorate.BoundedStaleness(1),
    quorate.KBatchSync(4),
    quorate.Delayed(2),
    quorate.Deadline(limit=0.02, min_quorum=1),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_broken_off_anywhere_no_sample_is_lost(tmp_path: Path, policy: quorate.Policy) -> None:
    """Three lives, each ended at a random update; laws, samples and replay are those of one run."""
    task, draws, version = Toy(batch_norm_net), random.Random(repr(policy)), 0
    engine = quorate.Local(3, latency="shifted-exp:0.0005,0.001")
    for life in range(3):
        version += draws.randint(2, 5)
        options: dict[str, Any] = {"checkpoint_every": 1, "on_progress": stop_at(version)}
        if life == 0:
            with pytest.raises(Stopped):
                quorate.train(task, policy, engine, epochs=4, out=tmp_path / "run", **options)
        else:
            with pytest.raises(Stopped):
                quorate.resume(tmp_path / "run", task, **options)
    laws, watch = LawChecker(policy, 3, 13, 4), Watch()
    result = quorate.resume(tmp_path / "run", task, recorders=(laws, watch))
    assert result.summary["samples"] == {"applied": 400, "distinct": 100}
    assert quorate.replay(tmp_path / "run", task).result.digest == result.digest
    assert len({incarnation for _, incarnation in watch.returned}) >= 1


def test_a_run_until_something_holds_goes_on_until_it_does(tmp_path: Path) -> None:
    task, policy = Toy(), quorate.FullSync()
    with pytest.raises(Stopped):
        quorate.train(
            task,
            policy,
            quorate.Local(2),
            until="updates>=30",
            out=tmp_path / "run",
            checkpoint_every=3,
            on_progress=stop_at(10),
        )
    assert quorate.resume(tmp_path / "run", task).summary["updates"] == 30
    again = quorate.resume(tmp_path / "run", task, until="updates>=35")
    assert again.summary["updates"] == 35
    assert quorate.replay(tmp_path / "run", task).result.digest == again.digest


ENDS: dict[str, dict[str, Any]] = {
    "updates": {"updates": 9},
    "epochs": {"epochs": 2},
    "until": {"until": "updates >= 9"},
}


@pytest.mark.parametrize("policy", [quorate.BackupSync(2, 1, late="finish"), quorate.FullSync()], ids=repr)
@pytest.mark.parametrize("end", ENDS)
def test_broken_off_after_its_last_update_it_is_brought_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, policy: quorate.Policy
) -> None:
    """Nothing is left to compute: what is open is dropped, as it would have been, and no update is added."""
    task, engine = Toy(batch_norm_net), quorate.Local(3, latency="shifted-exp:0.0005,0.001")

    def die(_: quorate.Local) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(quorate.Local, "digest", die)  # its last checkpoint is there
        with pytest.raises(Stopped):
            quorate.train(task, policy, engine, out=tmp_path / "run", **ENDS[end])
    version, watch = versions_saved(tmp_path)[-1], Watch()
    laws = (LawChecker(policy, 3, 13, 2),) if end == "epochs" else ()
    resumed = quorate.resume(tmp_path / "run", task, recorders=(*laws, watch))
    assert resumed.summary["updates"] == version and watch.lost_workers == []
    assert quorate.replay(tmp_path / "run", task).result.digest == resumed.digest
    before = (tmp_path / "run" / "trace.jsonl").read_bytes()
    with pytest.raises(quorate.BadInput, match="already; give"):
        quorate.resume(tmp_path / "run", task)
    assert (tmp_path / "run" / "trace.jsonl").read_bytes() == before
    longer = {"epochs": {"epochs": 3}}.get(end, {"updates": version + 3})
    last = quorate.resume(tmp_path / "run", task, **longer)
    assert last.summary["updates"] > version
    assert quorate.replay(tmp_path / "run", task).result.digest == last.digest


def test_a_longer_run_that_broke_off_is_not_taken_for_one_at_its_first_end(tmp_path: Path) -> None:
    task, policy = Toy(), quorate.FullSync()
    quorate.train(task, policy, quorate.Local(2), updates=6, out=tmp_path / "run")
    with pytest.raises(Stopped):
        quorate.resume(tmp_path / "run", task, updates=20, checkpoint_every=2, on_progress=stop_at(13))
    with pytest.raises(quorate.BadInput, match="has its 6 updates already; give more"):
        quorate.resume(tmp_path / "run", task)
    assert quorate.resume(tmp_path / "run", task, updates=20).summary["updates"] == 20


LONGER = [*POLICIES, quorate.AdaptiveBackup()]


@pytest.mark.parametrize("policy", LONGER, ids=repr)
def test_a_run_resumed_with_more_epochs_replays(tmp_path: Path, policy: quorate.Policy) -> None:
    """At its end, after a break in the midst, and with an end of another kind."""
    task, run = Toy(batch_norm_net), tmp_path / "run"
    engine = quorate.Local(3, latency="shifted-exp:0.0005,0.001")
    quorate.train(task, policy, engine, epochs=1, out=run)
    with pytest.raises(Stopped):
        quorate.resume(run, task, epochs=2, checkpoint_every=1, on_progress=stop_at(versions_saved(tmp_path)[-1] + 2))
    result = quorate.resume(run, task, epochs=3)
    assert result.summary["samples"] == {"applied": 300, "distinct": 100}
    assert quorate.replay(run, task).result.digest == result.digest
    with pytest.raises(quorate.BadInput, match="has begun epoch 3, but epochs is 2; give 3 or more"):
        quorate.resume(run, task, epochs=2)
    longer = quorate.resume(run, task, updates=result.summary["updates"] + 5)
    assert quorate.replay(run, task).result.digest == longer.digest
    last = quorate.resume(run, task, epochs=9, updates=longer.summary["updates"] + 2)
    assert quorate.replay(run, task, gradients=False).lines > 0
    assert quorate.replay(run, task).result.digest == last.digest
