"""Gradients and rounds captured as CUDA graphs: the bits of those computed call by call.

Without a GPU a stand-in runs the calls again where a graph would be launched: all is tested but CUDA itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quorate
from quorate import learner
from quorate.engines.simulated import cuda_graphs
from quorate.engines.simulated.asynchronous import GradientMemory
from quorate.engines.simulated.engine import InProcessEngine
from tests.toy_tasks import Toy, adam, plain_sgd, sgd

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


class Graph:
    """Stands in for a CUDA graph."""

    def __init__(self, compute: Callable[[], Tensor], clear: Callable[[], None]) -> None:
        self._compute, self._clear, self.output = compute, clear, compute()

    def replay(self) -> None:
        self.output.copy_(self._compute())
        self._clear()


class SlotWithoutGpu(GradientMemory):
    """Stands in for one whose numbers come from a device."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self.numbers = torch.zeros(2, dtype=torch.float64)
        self.done = SimpleNamespace(record=lambda: None, synchronize=lambda: None)


@pytest.fixture(autouse=True)
def _a_graph_or_its_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    if HAS_GPU:
        return

    def capture(compute: Callable[[], Tensor], clear: Callable[[], None], hold: Callable[[], Any], _: Any) -> Any:
        held, graph = hold(), Graph(compute, clear)
        return SimpleNamespace(graph=graph, output=graph.output, held=held)

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    monkeypatch.setattr(cuda_graphs, "share_of_memory", lambda worker, batches: 0.001)
    monkeypatch.setattr(
        InProcessEngine,
        "_graph",
        lambda engine, worker, groups=1: cuda_graphs.gradient_graph(worker, groups) if engine.graphs else None,
    )
    monkeypatch.setattr(cuda_graphs, "_Slot", SlotWithoutGpu)
    # Norms as a GPU takes them; BLAS rounds by how the numbers lie.
    monkeypatch.setattr(learner, "global_norm", lambda tensors: float(torch.stack(torch._foreach_norm(tensors)).norm()))


def _normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


class CountsItsCalls(Toy):
    """A loss that depends on something in Python, which a graph would not see."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) * (1 + self.calls % 2)


class WaitsForTheDevice(Toy):
    """After it has drawn by chance, which a failed capture must leave as it was."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss * 2 if loss.item() > 1000 else loss


class OneSampleIsNan(Toy):
    """In a batch with which nothing is tried out."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.data.tensors[0][40] = torch.nan


def _uses_a_graph(engine: quorate.Simulated) -> bool:
    return getattr(engine._strategy, "_graph", None) is not None


def _train(task: Any, policy: quorate.Policy, graphs: bool, together: bool | None = None, **learning: Any) -> str:
    workers = 1 if isinstance(policy, quorate.Delayed) else 5
    engine = quorate.Simulated(workers, "shifted-exp:1,1", device=DEVICE, graphs=graphs, together=together)
    result = quorate.train(task, policy, engine, updates=60, **learning)
    return learner.digest(result.parameters)


POLICIES = [
    quorate.Async(),
    quorate.Async(max_staleness=3),
    quorate.SoftSync(2),
    quorate.Delayed(4),
    quorate.BoundedStaleness(2),
]
LEARNING: list[dict[str, float]] = [{}, {"clip_norm": 0.5, "ema": 0.9}, {"delay_compensation": 0.5}]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("learning", LEARNING, ids=repr)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "vmapped"])
def test_a_run_with_graphs_has_the_bits_of_a_plain_one(
    policy: quorate.Policy, learning: dict[str, float], together: bool
) -> None:
    digests = {_train(Toy(_normed, plain_sgd), policy, graphs, together, **learning) for graphs in (True, False)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("policy", "workers"),
    [
        (quorate.FullSync(), 1),
        (quorate.FullSync(), 5),
        (quorate.BackupSync(4, 1), 5),
        (quorate.Deadline(1.5), 5),
        (quorate.AdaptiveBackup(), 5),
    ],
    ids=repr,
)
@pytest.mark.parametrize("learning", LEARNING[:2], ids=repr)
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_a_round_as_a_graph_has_the_bits_of_a_plain_one(
    policy: quorate.Policy, workers: int, learning: dict[str, float], optimizer: Any, tmp_path: Path
) -> None:
    traces = []
    for graphs in (True, False):
        engine = quorate.Simulated(workers, "shifted-exp:1,1", device=DEVICE, graphs=graphs, together=True)
        options: dict[str, Any] = {**learning, "out": tmp_path / str(graphs)}
        result = quorate.train(Toy(_normed, optimizer), policy, engine, updates=60, evaluate_every=20, **options)
        assert _uses_a_graph(engine) == graphs
        header, *lines = (tmp_path / str(graphs) / "trace.jsonl").read_text().splitlines()
        assert json.loads(header)["engine"]["graphs"] is graphs
        traces.append((lines, result.digest))
    assert traces[0] == traces[1]


class DrawsInPython(Toy):
    """Half of the time there is one layer less."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        hidden = model[0](x) if random.random() < 0.5 else model[0](x) + model[2](model[1](model[0](x)))
        return nn.functional.cross_entropy(model[3](hidden), y)


def _with_a_layer_more() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))


class WarmsUp(Toy):
    """A weight that rises over the training: at first it makes no difference that can be seen."""

    seen = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += 1
        return super().loss(model, batch) + 1e-4 * self.seen * sum(p.square().sum() for p in model.parameters())


class Embeds(Toy):
    """A forward pass that writes parameters, but only those of its samples, and the same again when asked again."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.Embedding(100, 3, max_norm=0.5),
            lambda params: torch.optim.SGD(params, lr=0.05, weight_decay=0.1),
        )

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model((x[:, 0].abs() * 30).long() % 100), y)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


class WritesParameters(Toy):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        return super().loss(model, batch)


@pytest.mark.parametrize("policy", [quorate.FullSync(), quorate.Async()], ids=repr)
@pytest.mark.parametrize(
    "make",
    [lambda: DrawsInPython(_with_a_layer_more), WarmsUp, WritesParameters, Embeds],
    ids=["draws", "counts", "writes parameters", "embeds"],
)
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
def test_what_a_loss_does_in_python_is_never_left_out(make: Any, policy: quorate.Policy, together: bool) -> None:
    """And trying it out leaves nothing behind."""
    digests = set()
    for graphs in (True, False):
        for seed in range(3):
            random.seed(seed)
            digests.add((seed, _train(make(), policy, graphs, together)))
    assert len(digests) == 3


@pytest.mark.parametrize("learning", LEARNING[:2], ids=repr)
@pytest.mark.parametrize("policy", [quorate.FullSync(), quorate.Async()], ids=repr)
def test_double_precision_stays_double(policy: quorate.Policy, learning: dict[str, float]) -> None:
    class Double(Toy):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, (batch[0].double(), batch[1]))

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            return {}

    digests = {_train(Double(lambda: _normed().double()), policy, graphs, True, **learning) for graphs in (True, False)}
    assert len(digests) == 1


def test_a_replay_uses_graphs_only_where_the_run_did(tmp_path: Path) -> None:
    calls: list[int] = []

    class Shifts(Toy):
        """Depends on Python in a way that no try shows."""

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            calls.append(1)
            return super().loss(model, batch) * (2 if len(calls) > 25 else 1)

    engine = quorate.Simulated(4, "shifted-exp:1,1", device=DEVICE, graphs=False, together=True)
    quorate.train(Shifts(_normed), quorate.FullSync(), engine, updates=40, out=tmp_path / "run")
    calls.clear()
    quorate.replay(tmp_path / "run" / "trace.jsonl", Shifts(_normed), device=DEVICE)


def test_tensors_that_a_graph_reads_live_as_long_as_it_does() -> None:
    class Grows(Toy):
        """A table that measuring replaces by a larger one."""

        table: Tensor | None = None

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            if self.table is None:
                self.table = torch.ones(3, device=batch[0].device)
            return super().loss(model, batch) * self.table[0]

    task = Grows(_normed)
    engine = quorate.Simulated(4, "shifted-exp:1,1", device=DEVICE, together=True)
    quorate.train(task, quorate.FullSync(), engine, updates=3)
    held = engine._strategy._graph._captured.held
    values = [value for place in held for value in (place.values() if isinstance(place, dict) else place)]
    assert any(value is task.table for value in values)


def test_a_round_that_is_not_finite_is_found_with_a_graph() -> None:
    digests = {_train(OneSampleIsNan(_normed, sgd), quorate.FullSync(), graphs, True) for graphs in (True, False)}
    assert len(digests) == 1


def test_an_engine_that_is_used_again_without_a_task_learns_nothing() -> None:
    engine = quorate.Simulated(4, "shifted-exp:1,1", device=DEVICE, together=True)
    quorate.train(Toy(_normed), quorate.FullSync(), engine, updates=3)
    assert quorate.train(None, quorate.FullSync(), engine, updates=3).parameters == {}


def test_a_large_round_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_MOST_MEMORY", 0.0)
    engine = quorate.Simulated(5, "shifted-exp:1,1", device=DEVICE, together=True)
    quorate.train(Toy(_normed, sgd), quorate.FullSync(), engine, updates=3)
    assert not _uses_a_graph(engine)


@pytest.mark.parametrize("policy", [quorate.Async(), quorate.FullSync()], ids=repr)
@pytest.mark.parametrize("task", [CountsItsCalls, WaitsForTheDevice])
def test_a_loss_that_cannot_be_captured_is_computed_call_by_call(task: type[Toy], policy: quorate.Policy) -> None:
    """After which chance still works, for it and for others."""
    for make in (task, Toy, task):
        assert _train(make(_normed), policy, True, isinstance(policy, quorate.FullSync)) is not None


def test_a_captured_vmapped_call_has_the_bits_of_a_plain_one() -> None:
    digests = set()
    for graphs in (True, False):
        engine = quorate.Simulated(5, "shifted-exp:1,1", device=DEVICE, graphs=graphs, together=True)
        result = quorate.train(Toy(_normed, plain_sgd), quorate.Async(), engine, updates=60)
        assert result.metrics.header["engine"]["arithmetic"] == "vmapped"
        digests.add(result.digest)
    assert len(digests) == 1
