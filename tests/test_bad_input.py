"""Bad input gets a sentence that names the value, the rule and the remedy, and leaves no files behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import quorate
from quorate.data_parallel.engine import check_collective
from quorate.learner import Learning
from quorate.policies import build_policy
from quorate.task import load_task
from quorate.user_code import policy_class
from tests.own_policies import FromScratch
from tests.toy_tasks import Toy

ENGINE = quorate.Simulated(4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: quorate.BackupSync(0), "quorum is 0"),
        (lambda: quorate.BackupSync(6, -2), "backups is -2"),
        (lambda: quorate.BackupSync(2.5), "quorum is 2.5"),  # type: ignore[arg-type]
        (lambda: quorate.BackupSync(2, late="perhaps"), "cancel, finish"),
        (lambda: quorate.Async(-1), "max_staleness is -1"),
        (lambda: quorate.SoftSync(0), "quorum is 0"),
        (lambda: quorate.BoundedStaleness(-1), "bound is -1"),
        (lambda: quorate.KBatchSync(0), "quorum is 0"),
        (lambda: quorate.Delayed(-1), "delay is -1"),
        (lambda: quorate.Delayed(1, warm_up=-1), "warm_up is -1"),
        (lambda: quorate.Deadline(limit=0), "limit is 0"),
        (lambda: quorate.Deadline(slack=0.5), "slack is 0.5"),
        (lambda: quorate.Deadline(min_quorum=0), "min_quorum is 0"),
        (lambda: policy_class("bakcup"), "async, backup, bounded"),
        (lambda: build_policy(policy_class("async"), {"quorum": 3}), "no option 'quorum'"),
        (lambda: quorate.SoftSync(10**17), "quorum is 100,000,000,000,000,000, but the limit is 1,000,000"),
        (lambda: quorate.KBatchSync(10**9), "quorum is 1,000,000,000, but the limit is 1,000,000"),
        (lambda: quorate.Simulated(10**9), "workers is 1,000,000,000, but the limit is 100,000"),
        (
            lambda: quorate.Simulated(4, faults="lose:1000000000@1"),
            "a worker of faults is 1,000,000,000, but the limit",
        ),
        (lambda: quorate.Simulated(0), "workers is 0"),
        (lambda: quorate.Simulated(4, "zipf:1"), "chen2016"),
        (lambda: quorate.Simulated(4, "constant:-1"), "-1"),
        (lambda: quorate.Simulated(4, device="quantum"), "quantum"),
        (lambda: quorate.Simulated(4, network="1Gbps"), "bandwidth=1Gbps"),
        (lambda: quorate.Simulated(4, network="bandwidth=0bps"), "more than 0"),
        (lambda: quorate.Simulated(4, network="latency=-1ms"), "negative"),
        (lambda: quorate.Simulated(4, network="bandwidth=1..2Gbps"), "not a rate"),
        (
            lambda: quorate.Simulated(4, network="bandwidth=1G"),
            "not a rate; write e.g. 1Gbit, 10GbE, 250Mbps or 125MB/s",
        ),
        (lambda: quorate.Simulated(4, device="meta"), "use cpu or cuda"),
        (lambda: Learning(clip_norm=0), "clip_norm is 0"),
        (lambda: Learning(ema=1.5), "ema is 1.5"),
        (lambda: Learning(delay_compensation=-1), "delay_compensation is -1"),
        (lambda: load_task("digit"), "digits"),
        (lambda: load_task("nowhere.py:Task"), "does not exist"),
        (lambda: load_task("no.such.module:Task"), "cannot be imported"),
        (lambda: load_task("quorate.tasks.digits:Nothing"), "no class 'Nothing'"),
    ],
)
def test_values_are_checked_when_they_are_given(make: Any, words: str) -> None:
    with pytest.raises(quorate.BadInput, match=words.replace("+", r"\+")):
        make()


def refused(tmp_path: Path, words: str, task: Any = None, policy: Any = None, **options: Any) -> None:
    options = {"updates": 2, **options}
    with pytest.raises(quorate.BadInput, match=words):
        quorate.train(task or Toy(), policy or quorate.FullSync(), ENGINE, out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists(), "nothing is half-written"


class WithoutLoss:
    def model(self) -> Any: ...
    def train_data(self) -> Any: ...
    def optimizer(self, params: Any) -> Any: ...


class OnlyInherits(quorate.Task):
    def model(self) -> Any: ...


def variant(**methods: Any) -> Any:
    return type("Variant", (Toy,), methods)()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (WithoutLoss(), "no method 'loss'"),
        (OnlyInherits(), "no method 'train_data'"),
        (variant(model=lambda self: "net"), "model.* gave a str"),
        (variant(model=lambda self: torch.nn.ReLU()), "no parameter to train"),
        (variant(loss=lambda self, m, b: m(b[0])), r"shape \(8, 3\)"),
        (variant(loss=lambda self, m, b: 3.0), "gave a float"),
        (variant(loss=lambda self, m, b: torch.tensor(1.0)), "depends on no parameter"),
        (variant(optimizer=lambda self, p: None), "optimizer.* gave a NoneType"),
        (variant(optimizer=lambda self, p: torch.optim.LBFGS(p)), "LBFGS"),
        (variant(evaluate=lambda self, m: 0.9), "evaluate.* gave a float"),
        (variant(evaluate=lambda self, m: {"a": "high"}), "must be one number"),
        (variant(schedule=lambda self, o: torch.optim.lr_scheduler.ReduceLROnPlateau(o)), "ReduceLROnPlateau"),
        (variant(model=lambda self: torch.nn.LazyLinear(3)), "lazy parameters"),
        (variant(model=lambda self: torch.nn.Linear(6, 3, device="meta")), "weight is on the meta device"),
        (variant(model=lambda self: torch.nn.Linear(6, 3, dtype=torch.complex64)), "weight is a complex parameter"),
        (variant(train_data=lambda self: TensorDataset(torch.zeros(0, 6))), "empty"),
        (variant(train_data=lambda self: iter([1, 2])), "cannot be indexed"),
        (Toy(samples=5, batch_size=8), "batch_size is 8.*only 5 samples"),
        (Toy(samples=20, batch_size=8), "an epoch has only 3.*batch_size of at most 5"),
        (Toy(make=lambda: torch.nn.Sequential(torch.nn.Flatten(), Sparse())), "sparse"),
    ],
)
def test_tasks_are_checked(task: Any, words: str, tmp_path: Path) -> None:
    refused(tmp_path, words, task=task)


class Sparse(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table((x[:, 0].abs() * 3).long().clamp(0, 9))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"updates": None}, "updates, epochs or until"),
        ({"updates": 0}, "updates is 0"),
        ({"updates": 1.5}, "updates is 1.5"),
        ({"epochs": 0}, "epochs is 0"),
        ({"until": "accuracy=0.9"}, "accuracy>=0.95"),
        ({"until": "seconds>=1..2"}, "not understood"),
        ({"until": "acuracy>=0.9", "updates": None}, "gives no 'acuracy' .did you mean accuracy"),
        ({"evaluate_every": 0}, "evaluate_every is 0"),
        ({"patience_s": -1}, "patience_s is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"policy": quorate.BackupSync(9)}, "quorum is 9, but the run has 4 workers"),
        ({"policy": quorate.BackupSync(2, 1)}, r"give the engine \(or torchrun\) 3 workers"),
        ({"policy": quorate.Deadline(quorum=5)}, "quorum is 5"),
        ({"policy": quorate.Deadline(min_quorum=5)}, "min_quorum is 5"),
    ],
)
def test_runs_are_checked(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(tmp_path, words, **options)


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    quorate.train(Toy(), quorate.FullSync(), ENGINE, updates=2, out=tmp_path / "run")
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    with pytest.raises(quorate.BadInput, match="already holds a run"):
        quorate.train(Toy(), quorate.FullSync(), ENGINE, updates=2, out=tmp_path / "run")
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(quorate.BadInput, match="is a file"):
        quorate.train(Toy(), quorate.FullSync(), ENGINE, updates=2, out=tmp_path / "file")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (quorate.Async(), "one of: adaptive, backup, deadline, delayed, full-sync$"),
        (quorate.KBatchSync(2), "cannot run policy 'k-batch'"),
        (FromScratch(), "cannot run policy 'from-scratch'.*set collective = True in the class if it keeps that rule"),
    ],
)
def test_a_policy_an_engine_cannot_run_is_refused_with_those_it_can(policy: quorate.Policy, words: str) -> None:
    with pytest.raises(quorate.BadInput, match=words):
        check_collective(policy)


def test_a_network_without_a_size_is_refused() -> None:
    with pytest.raises(quorate.BadInput, match="model_bytes"):
        quorate.train(None, quorate.Async(), quorate.Simulated(2, network="bandwidth=1Gbps"), updates=1)
