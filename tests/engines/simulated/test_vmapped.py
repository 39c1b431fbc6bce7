"""Gradients of several versions in one vmapped call: the same training as one by one, but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.common.made_up import pictures
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quorate
from quorate.engines.simulated import vmapped
from quorate.engines.simulated.vmapped import Batchable, conv2d, weight_norm
from quorate.ledger import Ledger
from quorate.tasks.charlm import CharLm
from quorate.tasks.cifar10 import Cifar10Inception
from quorate.tasks.mnist import Mnist
from quorate.tasks.pixelcnn import PixelCnn
from tests.toy_tasks import Toy, adam, batch_norm_net, plain_sgd, sgd

POLICIES = [
    quorate.Async(),
    quorate.Async(max_staleness=3),
    quorate.Async(staleness_weights=True),
    quorate.SoftSync(2),
    quorate.BoundedStaleness(2),
]
LEARNING: list[dict[str, float]] = [{}, {"clip_norm": 0.5, "ema": 0.9}, {"delay_compensation": 0.5}]


#: The vmapped model is tried with two batches, as in training and without randomness.
TRIES = 2
Computed = list[list[int]]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    """The batches of each call, the tries at the beginning first."""
    calls: Computed = []
    compute = vmapped.VmappedModel.compute
    monkeypatch.setattr(
        vmapped.VmappedModel, "compute", lambda model, batches: (calls.append(list(batches)), compute(model, batches))
    )
    return calls


def _pictures() -> nn.Module:
    """Six numbers as a picture of 2×3, and layers of many kinds."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, (2, 1)),
        nn.GroupNorm(2, 4),
        nn.Flatten(),
        nn.utils.parametrizations.weight_norm(nn.Linear(12, 3)),
    )


def _run(task: Any, policy: quorate.Policy, together: bool, workers: int = 5, **options: Any) -> quorate.Result:
    engine = quorate.Simulated(workers, "shifted-exp:1,1", together=together, **options.pop("engine", {}))
    return quorate.train(task, policy, engine, updates=40, **options)


def _assert_close(one: quorate.Result, other: quorate.Result) -> None:
    assert one.parameters.keys() == other.parameters.keys()
    for name, tensor in one.parameters.items():
        torch.testing.assert_close(tensor, other.parameters[name], rtol=1e-3, atol=1e-4)


def _arithmetic(result: quorate.Result) -> str:
    found: str = result.metrics.header["engine"]["arithmetic"]
    return found


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("learning", LEARNING, ids=repr)
@pytest.mark.parametrize("make", [batch_norm_net, _pictures], ids=["batch norm", "pictures"])
def test_a_vmapped_run_is_the_plain_run(make: Any, policy: quorate.Policy, learning: dict[str, float]) -> None:
    plain, batched = (_run(Toy(make, plain_sgd), policy, together, **learning) for together in (False, True))
    assert _arithmetic(plain) == "kept" and _arithmetic(batched) == "vmapped"
    assert plain.metrics.seconds == batched.metrics.seconds
    _assert_close(plain, batched)


@pytest.mark.parametrize("policy", [quorate.Delayed(1), quorate.Delayed(4), quorate.Delayed(20, warm_up=15)], ids=repr)
@pytest.mark.parametrize("learning", LEARNING, ids=repr)
@pytest.mark.parametrize("make", [batch_norm_net, _pictures], ids=["batch norm", "pictures"])
def test_one_late_worker_computes_ahead(
    make: Any, policy: quorate.Delayed, learning: dict[str, float], computed: Computed
) -> None:
    plain, batched = (
        _run(Toy(make, plain_sgd, samples=92), policy, together, 1, **learning) for together in (False, True)
    )
    assert _arithmetic(plain) == "kept" and _arithmetic(batched) == "vmapped"
    assert max(map(len, computed)) >= min(policy.delay + 1, 8)  # at the end of an epoch a smaller batch is in the way
    _assert_close(plain, batched)


@pytest.mark.parametrize("optimizer", [sgd, adam], ids=["momentum", "adam"])
def test_more_workers_than_rows(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quorate.engines.simulated.engine.MOST_AT_ONCE", 3)
    plain, batched = (_run(Toy(optimizer=optimizer), quorate.Async(), together, 8) for together in (False, True))
    assert _arithmetic(batched) == "vmapped"
    _assert_close(plain, batched)


def test_several_are_computed_in_one_call(computed: Computed) -> None:
    engine = quorate.Simulated(8, "lognormal:1,0.1", together=True)
    quorate.train(Toy(samples=800), quorate.Async(), engine, updates=200)
    del computed[:TRIES]
    assert 200 <= sum(map(len, computed)) < 220 and sum(map(len, computed)) / len(computed) > 6


def test_workers_that_leave_and_come_back() -> None:
    engine = {"faults": "lose:1@3;join:1@9;lose:2@5"}
    plain, batched = (_run(Toy(), quorate.Async(), together, engine=engine) for together in (False, True))
    assert _arithmetic(batched) == "vmapped"
    _assert_close(plain, batched)


def test_what_is_lost_before_it_is_due_is_never_computed(computed: Computed) -> None:
    engine = quorate.Simulated(3, "constant:1*slow:2=50", faults="lose:2@0.5", together=True)
    quorate.train(Toy(samples=800), quorate.Async(), engine, updates=20)
    batches = [batch for call in computed[TRIES:] for batch in call]
    assert 20 <= len(batches) < 24 and batches.count(2) <= 1  # the lost one's batch, which another has to do


@pytest.mark.parametrize("policy", [quorate.Async(), quorate.Delayed(3)], ids=repr)
@pytest.mark.parametrize("samples", [27, 64])
def test_to_the_end_of_the_data_whose_last_batch_may_be_smaller(policy: quorate.Policy, samples: int) -> None:
    """At the end of a run fewer and fewer tickets are under way."""
    plain, batched = (
        quorate.train(
            Toy(samples=samples, batch_size=8),
            policy,
            quorate.Simulated(1 if policy.history else 4, "pause:0.05,0.05,10", together=together),
            epochs=3,
        )
        for together in (False, True)
    )
    assert _arithmetic(batched) == "vmapped"
    _assert_close(plain, batched)


class BadSample(Toy):
    """One sample has no gradient that is finite."""

    bad = 55

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        bad = (x == self.data.tensors[0][self.bad]).all(1).any()
        return functional.cross_entropy(model(x), y) * torch.where(bad, torch.nan, 1.0)


def test_a_gradient_that_is_not_finite_spoils_no_other() -> None:
    plain, batched = (_run(BadSample(), quorate.Async(), together) for together in (False, True))
    assert _arithmetic(batched) == "vmapped"
    assert batched.metrics.refused_tickets == plain.metrics.refused_tickets > 0
    _assert_close(plain, batched)


def test_what_comes_after_a_late_worker_is_foreseen_only_from_versions_that_are_there() -> None:
    """One that joins late takes up the batch that was refused, and is due when nobody else is under way."""
    task = BadSample(optimizer=plain_sgd, samples=64)
    task.bad = Ledger(64, 8, seed=0).indices(4)[0]
    plain, batched = (
        quorate.train(
            task,
            quorate.Delayed(3, late="finish"),
            quorate.Simulated(1, "constant:1*slow:1=2.9", faults="join:1@7.5;lose:0@9.5", together=together),
            updates=12,
            seed=0,
        )
        for together in (False, True)
    )
    assert _arithmetic(batched) == "vmapped"
    _assert_close(plain, batched)


class AsksForANumber(Toy):
    """A loss that looks at a value in Python, which cannot be done for several at once."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        return loss if loss.item() < 100 else loss * 2


class Unused(nn.Module):
    """Has a parameter that no loss depends on, and which an optimizer leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


class SumOfASum(Toy):
    """Not a mean: one big batch would not do, a vmapped call does."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) ** 2


class UnusedInShortOnes(Unused):
    """The last batch of an epoch does not reach all parameters."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y + self.unused(x) if len(x) == 8 else y


class WritesIntoParameters(nn.Module):
    """What a forward pass makes of the newest version is the newest version."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 4, max_norm=0.5), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.words((3 * x).long().clamp(-10, 9) + 10).flatten(1))
        return y


class Remembers(nn.Module):
    """Goes on with what the last forward pass left, in an attribute that is no buffer."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.layer, self.mean, self.in_place = nn.Linear(6, 3), torch.zeros(6), in_place

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.in_place and self.training:  # not so while gradients are compared
            self.mean.lerp_(mean, 0.01)
        elif not self.in_place:
            self.mean = self.mean.lerp(mean, 0.01)
        y: Tensor = self.layer(x if self.in_place else x - self.mean)
        return y


class KeepsLosses(Toy):
    """To be looked at when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.losses.append(super().loss(model, batch))
        return self.losses[-1]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"lately": float(torch.stack(self.losses[-3:]).mean())}


class HasParametersFromElsewhere(Toy):
    """A loss that knows parameters not only from the model it is given; what is lost without them is small."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        self.known = list(params)
        return super().optimizer(self.known)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) + 1e-4 * sum(one.square().sum() for one in self.known)


@pytest.mark.parametrize(
    "task",
    [
        AsksForANumber,
        lambda: Toy(Unused),
        lambda: Toy(UnusedInShortOnes),
        lambda: Toy(samples=8, batch_size=8),
        lambda: Toy(WritesIntoParameters),
        lambda: Toy(Remembers),
        lambda: Toy(lambda: Remembers(in_place=True)),
        KeepsLosses,
        HasParametersFromElsewhere,
    ],
    ids=["number", "unused", "short", "one", "writes", "remembers", "in place", "keeps", "elsewhere"],
)
def test_what_cannot_be_vmapped_is_computed_one_by_one(task: Any) -> None:
    result = _run(task(), quorate.Async(), True)
    assert _arithmetic(result) == "kept"
    assert result.digest == _run(task(), quorate.Async(), False).digest  # trying has left no trace


class Recurrent(nn.Module):
    """Torch's own keeps its weights in a list, too, and looks whether they are still the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.layer(x[..., None])[0]
        y: Tensor = self.out(self.seen[:, -1])
        return y


class ViewOfAConvolution(nn.Module):
    """Wants what a convolution gives in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.layer(x.view(-1, 1, 2, 3)).relu().view(len(x), -1))
        return y


@pytest.mark.parametrize("make", [Recurrent, ViewOfAConvolution])
def test_what_goes_side_by_side_all_the_same(make: Any) -> None:
    plain, batched = (_run(Toy(make, plain_sgd), quorate.Async(), together) for together in (False, True))
    assert _arithmetic(batched) == "vmapped"
    _assert_close(plain, batched)


class LeavesOut(Toy):
    """Its batches are smaller where a sample is no good, which the first two do not show."""

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        good = [sample for sample in samples if sample[0][0] < 1.9]
        return [torch.stack(column) for column in zip(*good, strict=True)]


@pytest.mark.parametrize("policy", [quorate.Async(), quorate.Delayed(3)], ids=repr)
def test_a_batch_that_does_not_fit_goes_alone(policy: quorate.Policy) -> None:
    task = LeavesOut(batch_norm_net, plain_sgd)
    workers = 1 if policy.history else 5
    plain, batched = (_run(task, policy, together, workers) for together in (False, True))
    assert _arithmetic(batched) == "vmapped"
    _assert_close(plain, batched)


class Huge(Toy):
    """The squares of its gradients are more than a number of 32 bits can be."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, batch) * 1e21


def test_a_gradient_is_finite_even_if_its_square_is_not() -> None:
    learning = {"clip_norm": 1.0}
    plain, batched = (
        _run(Huge(optimizer=plain_sgd), quorate.Async(), together, **learning) for together in (False, True)
    )
    assert _arithmetic(batched) == "vmapped" and batched.metrics.refused_tickets == 0
    _assert_close(plain, batched)


class Double(Toy):
    def model(self) -> nn.Module:
        return batch_norm_net().double()

    def train_data(self) -> Any:
        x, y = self.data.tensors
        return TensorDataset(x.double(), y)

    evaluate = None  # type: ignore[assignment]


def test_64_bits_stay_64_bits() -> None:
    learning = {"clip_norm": 0.1}
    plain, batched = (
        _run(Double(optimizer=plain_sgd), quorate.Async(), together, **learning) for together in (False, True)
    )
    assert _arithmetic(batched) == "vmapped"
    assert plain.summary["loss"] == pytest.approx(batched.summary["loss"], rel=1e-12)
    torch.testing.assert_close(plain.parameters, batched.parameters, rtol=1e-10, atol=1e-12)


def test_a_loss_need_not_be_a_mean() -> None:
    plain, batched = (_run(SumOfASum(optimizer=plain_sgd), quorate.Async(), together) for together in (False, True))
    assert _arithmetic(batched) == "vmapped"
    _assert_close(plain, batched)


def _drops() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 3))


def test_equal_seeds_give_equal_bits_also_with_chance_and_when_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    first = _run(Toy(_drops), quorate.Async(), True, out=out)
    compute = vmapped.VmappedModel.compute
    monkeypatch.setattr(
        vmapped.VmappedModel, "compute", lambda model, batches: (torch.rand(1), compute(model, batches))
    )
    second = _run(Toy(_drops), quorate.Async(), True)  # chance is the batches' own, whatever else is drawn
    assert _arithmetic(first) == "vmapped"
    assert first.digest == second.digest == quorate.replay(out, Toy(_drops)).result.digest


@pytest.mark.parametrize(
    "task",
    [
        lambda: Mnist((pictures(64, channels=1, size=28), pictures(8, channels=1, size=28)), channels=(4, 4, 4, 8)),
        lambda: Cifar10Inception((pictures(64), pictures(8)), width=0.1),
        lambda: PixelCnn((pictures(64, size=8), pictures(8, size=8)), channels=6, layers=1, mixtures=2, test_samples=8),
        lambda: CharLm(text="the first of many, and the last of few; " * 100, context=8, width=8, layers=1, heads=2),
        lambda: "digits",
    ],
    ids=["mnist", "inception", "pixelcnn", "charlm", "digits"],
)
def test_ready_tasks_go_side_by_side(task: Any) -> None:
    engine = quorate.Simulated(3, "shifted-exp:1,1", together=True)
    result = quorate.train(task(), quorate.Async(), engine, updates=4, batch_size=4)
    assert _arithmetic(result) == "vmapped"


# ---------------------------------------------------------------- convolutions


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(3, 7), st.integers(3, 7)),
    st.integers(1, 3),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.integers(1, 2),
    st.booleans(),
)
def test_convolutions_as_products(
    shape: tuple[int, ...],
    out: int,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: int,
    has_bias: bool,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(out, shape[1], *kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(out, dtype=torch.float64, requires_grad=True) if has_bias else None
    inputs = [one for one in (x, weight, bias) if one is not None]
    try:
        plain = torch.conv2d(x, weight, bias, stride, padding, dilation)
    except RuntimeError:  # the kernel is larger than the picture
        return
    product = conv2d(x, weight, bias, stride, padding, dilation)
    torch.testing.assert_close(product, plain)
    towards = torch.randn_like(plain)
    for one, other in zip(
        torch.autograd.grad(product, inputs, towards), torch.autograd.grad(plain, inputs, towards), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [{"padding": "same"}, {"groups": 2}, {"padding_mode": "reflect", "padding": 1}])
def test_other_convolutions_stay_what_they_are(options: dict[str, Any]) -> None:
    layer, x = nn.Conv2d(4, 6, 3, **options), torch.randn(2, 4, 8, 8)
    with Batchable():
        torch.testing.assert_close(layer(x), layer.forward(x))
    plain = layer(x)
    with Batchable():
        torch.testing.assert_close(layer(x), plain)


@pytest.mark.parametrize(("dim", "shape"), [(0, (4, 1, 1, 1)), (1, (1, 3, 1, 1)), (3, (1, 1, 1, 5)), (-1, ())])
def test_weight_norm_in_other_words(dim: int, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    direction = torch.randn(4, 3, 2, 5, dtype=torch.float64, requires_grad=True)
    length = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    plain, ours = torch._weight_norm(direction, length, dim), weight_norm(direction, length, dim)
    torch.testing.assert_close(ours, plain)
    towards = torch.randn_like(plain)
    for one, other in zip(
        torch.autograd.grad(ours, (direction, length), towards),
        torch.autograd.grad(plain, (direction, length), towards),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
