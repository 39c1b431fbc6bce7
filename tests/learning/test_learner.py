"""The learner's options beyond averaging, each compared with a few lines of plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import quorate
from quorate.engines.base import Job
from quorate.learner import Learner, Learning, digest
from quorate.ledger import Ledger
from quorate.metrics import Metrics
from quorate.task import bind_task
from tests.toy_tasks import Toy, adam, batch_norm_net, mlp, plain_loop, plain_sgd, sgd


def by_hand(task: Toy, updates: int, seed: int, after_backward: Any = None, after_step: Any = None) -> nn.Module:
    """A run with one worker, with hooks into the learner's steps."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    order = Ledger(len(task.data), task.batch_size, seed=seed)
    x, y = task.data.tensors
    for update in range(updates):
        rows = order.indices(update)
        optimizer.zero_grad()
        task.loss(model, (x[rows], y[rows])).backward()
        if after_backward:
            after_backward(model)
        optimizer.step()
        if after_step:
            after_step(model)
    return model


def test_clipping_scales_the_averaged_gradient() -> None:
    task = Toy()
    clip = 0.3
    result = quorate.train(task, quorate.FullSync(), quorate.Simulated(1), updates=40, clip_norm=clip)

    def clipped(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)

    model = by_hand(task, 40, 0, after_backward=clipped)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(result.parameters[name], tensor, rtol=1e-5, atol=1e-6)
    free = quorate.train(task, quorate.FullSync(), quorate.Simulated(1), updates=40)
    assert free.digest != result.digest


def test_evaluation_uses_the_moving_average_when_it_is_on() -> None:
    task = Toy()
    decay = 0.9
    averages: list[Tensor] = []

    def average(model: nn.Module) -> None:
        now = [parameter.detach().clone() for parameter in model.parameters()]
        if not averages:
            averages.extend(start)
        for old, new in zip(averages, now, strict=True):
            old.lerp_(new, 1 - decay)

    torch.manual_seed(0)
    start = [parameter.detach().clone() for parameter in task.model().parameters()]
    model = by_hand(task, 30, 0, after_step=average)
    result = quorate.train(task, quorate.FullSync(), quorate.Simulated(1), updates=30, ema=decay)
    assert result.averaged is not None
    for mine, theirs in zip(result.averaged.values(), averages, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(result.parameters.values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), averages, strict=True):
            parameter.copy_(value)
    assert result.evaluation == task.evaluate(model)


def test_the_schedule_follows_the_version_not_the_workers() -> None:
    rates: list[float] = []

    class Watched(Toy):
        def schedule(self, optimizer: Any) -> Any:
            self.optimizer_ = optimizer
            return torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)

        def evaluate(self, model: nn.Module) -> dict[str, float]:
            rates.append(self.optimizer_.param_groups[0]["lr"])
            return {}

    quorate.train(
        Watched(), quorate.BackupSync(2, 2), quorate.Simulated(4, "shifted-exp:1,1"), updates=30, evaluate_every=10
    )
    assert rates == [0.025, 0.0125, 0.00625]


def test_delay_compensation_adds_the_first_order_term() -> None:
    """Two workers in lock step: the second gradient of each pair is one version stale."""
    strength = 2.0
    task = Toy(mlp, plain_sgd)
    learning = {"delay_compensation": strength}
    engine = quorate.Simulated(2, "constant:1")
    result = quorate.train(task, quorate.Async(), engine, updates=2, **learning)

    torch.manual_seed(0)
    model = task.model()
    order = Ledger(len(task.data), task.batch_size)
    x, y = task.data.tensors
    start = [parameter.detach().clone() for parameter in model.parameters()]
    grads = []
    for batch in (0, 1):
        rows = order.indices(batch)
        loss = task.loss(model, (x[rows], y[rows]))
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    expected = []
    for w_read, first, second in zip(start, grads[0], grads[1], strict=True):
        w = w_read - 0.05 * first
        expected.append(w - 0.05 * (second + strength * second * second * (w - w_read)))
    for mine, theirs in zip(result.parameters.values(), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_staleness_weights_divide_by_staleness() -> None:
    """Three workers in lock step: gradients of staleness 0, 1 and 2, used with weights 1, 1 and 1/2."""
    task = Toy(mlp, plain_sgd)
    engine = quorate.Simulated(3, "constant:1")
    result = quorate.train(task, quorate.Async(staleness_weights=True), engine, updates=3)
    torch.manual_seed(0)
    model = task.model()
    order = Ledger(len(task.data), task.batch_size)
    x, y = task.data.tensors
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for batch, weight in ((0, 1.0), (1, 1.0), (2, 0.5)):
        rows = order.indices(batch)
        grads = torch.autograd.grad(task.loss(model, (x[rows], y[rows])), list(model.parameters()))
        for sum_, grad in zip(total, grads, strict=True):
            sum_.add_(grad, alpha=weight)
    for mine, parameter, sum_ in zip(result.parameters.values(), model.parameters(), total, strict=True):
        torch.testing.assert_close(mine, parameter.detach() - 0.05 * sum_)


def test_averaging_is_weighted_by_samples() -> None:
    """Nine samples in batches of four: the last round has a full batch and a single sample."""
    task = Toy(mlp, plain_sgd, samples=9, batch_size=4)
    result = quorate.train(task, quorate.FullSync(), quorate.Simulated(3), updates=1)
    torch.manual_seed(0)
    model = task.model()
    x, y = task.data.tensors
    grads = torch.autograd.grad(task.loss(model, (x, y)), list(model.parameters()))
    for mine, parameter, grad in zip(result.parameters.values(), model.parameters(), grads, strict=True):
        torch.testing.assert_close(mine, parameter.detach() - 0.05 * grad)


def test_batch_norm_statistics_are_averaged_over_the_kept_arrivals() -> None:
    task = Toy(batch_norm_net, plain_sgd)
    result = quorate.train(task, quorate.FullSync(), quorate.Simulated(2), updates=1)
    torch.manual_seed(0)
    model = task.model()
    order = Ledger(len(task.data), task.batch_size)
    means = []
    for batch in (0, 1):
        hidden = model[0](task.data.tensors[0][order.indices(batch)])
        means.append(0.1 * hidden.mean(0))
    torch.testing.assert_close(result.parameters["1.running_mean"], (means[0] + means[1]) / 2)
    assert result.parameters["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("policy", [quorate.Async(), quorate.SoftSync(3), quorate.Delayed(2)], ids=repr)
def test_stale_arrivals_move_batch_norm_statistics_towards_the_data(policy: quorate.Policy) -> None:
    task = Toy(batch_norm_net, lambda params: torch.optim.SGD(params, lr=1e-6))
    result = quorate.train(task, policy, quorate.Simulated(4, "shifted-exp:1,0.5"), updates=200)
    model = task.model()
    model.load_state_dict(result.parameters)
    with torch.no_grad():
        hidden = model[0](task.data.tensors[0])
    torch.testing.assert_close(result.parameters["1.running_mean"], hidden.mean(0), atol=0.3, rtol=0.3)
    assert result.parameters["1.num_batches_tracked"] > 100


# ---------------------------------------------------------------- NaN and Inf


class Poisoned(Toy):
    """One sample whose loss is NaN for the first `times` times it is seen (None: always)."""

    def __init__(self, times: int | None, value: float = math.nan, **parts: Any) -> None:
        super().__init__(**parts)
        self.times, self.seen, self.value = times, 0, value
        self.marked = self.data.tensors[0][17]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if (batch[0] == self.marked).all(1).any():
            self.seen += 1
            if self.times is None or self.seen <= self.times:
                return loss * self.value
        return loss


POLICIES = [
    quorate.FullSync(),
    quorate.BackupSync(3, 1),
    quorate.Async(),
    quorate.SoftSync(2),
    quorate.KBatchSync(3),
    quorate.Delayed(1),
    quorate.BoundedStaleness(1),
    quorate.Deadline(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_tried_again(policy: quorate.Policy, value: float) -> None:
    task = Poisoned(2, value)
    result = quorate.train(task, policy, quorate.Simulated(4, "shifted-exp:1,0.3"), epochs=2)
    assert result.summary["tickets"]["refused"] == 2
    assert result.summary["samples"] == {"applied": 200, "distinct": 100}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.parameters.values())


class _Overflow(torch.autograd.Function):
    """A function whose forward pass is harmless and whose backward pass gives Inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * math.inf


class OverflowsInBackward(Poisoned):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = Toy.loss(self, model, batch)
        if (batch[0] == self.marked).all(1).any():
            self.seen += 1
            if self.times is None or self.seen <= self.times:
                applied: Tensor = _Overflow.apply(loss)
                return applied
        return loss


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("together", [None, True])
def test_a_gradient_that_is_not_finite_though_its_loss_is(policy: quorate.Policy, together: bool | None) -> None:
    engine = quorate.Simulated(4, "shifted-exp:1,0.3", together=together)
    result = quorate.train(OverflowsInBackward(None), policy, engine, epochs=2)
    assert result.summary["tickets"]["refused"] == 6  # three times in each epoch
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.parameters.values())
    assert result.summary["tickets"]["applied"] == 24


@pytest.mark.parametrize("policy", [quorate.FullSync(), quorate.Async()], ids=repr)
def test_a_batch_that_never_gives_a_finite_gradient_is_given_up(policy: quorate.Policy) -> None:
    result = quorate.train(Poisoned(None), policy, quorate.Simulated(4, "shifted-exp:1,0.3"), epochs=2)
    assert result.summary["tickets"]["refused"] == 6  # three times in each epoch
    lost = 200 - result.summary["samples"]["applied"]
    assert 0 < lost <= 16
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.parameters.values())


def test_a_poisoned_gradient_in_a_round_computed_together_is_left_out() -> None:
    task = Poisoned(None)
    engine = quorate.Simulated(4, "shifted-exp:1,0.3", together=True)
    result = quorate.train(task, quorate.FullSync(), engine, epochs=2)
    assert result.summary["tickets"]["refused"] == 6
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.parameters.values())


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_an_epoch_of_which_nothing_is_usable_does_not_hang(policy: quorate.Policy) -> None:
    """The first epoch gives only NaN, the second is fine."""

    class Late(Toy):
        calls = 0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            self.calls += 1
            loss = super().loss(model, batch)
            return loss * math.nan if self.calls <= 3 * 5 else loss

    task = Late(samples=40, batch_size=8)
    result = quorate.train(task, policy, quorate.Simulated(4, "shifted-exp:1,0.3"), epochs=2)
    assert result.summary["tickets"]["refused"] >= 15
    assert result.summary["samples"]["distinct"] == 40


def test_training_that_diverges_ends_with_a_sentence() -> None:
    class Broken(Toy):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, batch) * math.nan

    with pytest.raises(quorate.Diverged, match="NaN or Inf"):
        quorate.train(Broken(), quorate.BackupSync(3, 1), quorate.Simulated(4), epochs=5)


# ---------------------------------------------------------------- equal seeds, equal runs


class Noisy(Toy):
    """Dropout, and data that draws random numbers."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))

    def train_data(self) -> Any:
        inner = self.data

        class Jittered(Dataset[Any]):
            def __len__(self) -> int:
                return len(inner)

            def __getitem__(self, index: int) -> Any:
                x, y = inner[index]
                return x + 0.01 * torch.randn(6), y

        return Jittered()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_equal_seeds_give_equal_bits(policy: quorate.Policy) -> None:
    def run(seed: int) -> str | None:
        engine = quorate.Simulated(4, "shifted-exp:1,1")
        return quorate.train(Noisy(), policy, engine, updates=20, seed=seed).digest

    torch.manual_seed(11)
    first = run(5)
    torch.manual_seed(12)
    state = torch.get_rng_state()
    assert run(5) == first
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are not touched"
    assert run(6) != first


def test_a_stream_is_data_whose_index_is_a_seed() -> None:
    class Endless(Toy):
        def train_data(self) -> Any:
            class Stream:
                def __getitem__(self, seed: int) -> Any:
                    draws = torch.Generator().manual_seed(seed)
                    x = torch.randn(6, generator=draws)
                    return x, (x[0] > 0).long()

            return Stream()

    result = quorate.train(Endless(), quorate.BackupSync(2, 1), quorate.Simulated(3, "shifted-exp:1,1"), updates=50)
    assert result.summary["samples"] == {"applied": 800, "distinct": 800}
    with pytest.raises(quorate.BadInput, match="no epochs"):
        quorate.train(Endless(), quorate.FullSync(), quorate.Simulated(2), epochs=1)


# ---------------------------------------------------------------- law 8: resume


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_law_8_a_learner_resumes_on_the_same_trajectory(optimizer: Any) -> None:
    schedule = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40)  # noqa: E731
    task = Toy(batch_norm_net, optimizer, schedule=schedule)
    learning = Learning(ema=0.9, clip_norm=1.0)
    bound, ledger = bind_task(task), Ledger(100, 8)
    device = torch.device("cpu")
    x, y = task.data.tensors

    def advance(learner: Learner, first: int, last: int) -> None:
        learner.model.train()
        for update in range(first, last):
            rows = ledger.indices(update)
            learner.clear_gradients()
            bound.loss(learner.model, (x[rows], y[rows])).backward()
            learner.step()

    straight = Learner(bound, learning, 0, device)
    advance(straight, 0, 30)
    broken = Learner(bound, learning, 0, device)
    advance(broken, 0, 17)
    saved = broken.state()
    advance(broken, 17, 20)  # later updates must not change the checkpoint
    resumed = Learner(bound, learning, 99, device)
    resumed.restore(saved)
    advance(resumed, 17, 30)
    assert resumed.version == straight.version == 30
    assert digest(resumed.state_dict()) == digest(straight.state_dict())
    assert digest(resumed.average_dict() or {}) == digest(straight.average_dict() or {})


def test_any_optimizer_of_torch_will_do() -> None:
    for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Adadelta", "Adamax", "Rprop", "ASGD", "RAdam"):
        task = Toy(mlp, lambda params, name=name: getattr(torch.optim, name)(params, lr=0.01))
        result = quorate.train(task, quorate.FullSync(), quorate.Simulated(1), updates=5)
        theirs = plain_loop(task, 5, seed=0)
        assert all(torch.equal(result.parameters[key], theirs[key]) for key in theirs), name


def test_job_is_what_an_engine_gets() -> None:
    """The header of a trace has all fields that a replay needs."""
    metrics = Metrics()
    result = quorate.train(Toy(), quorate.Async(3), quorate.Simulated(2), updates=3, recorders=(metrics,))
    assert metrics.header["policy"] == {"name": "async", "max_staleness": 3, "staleness_weights": False}
    assert metrics.summary() == result.summary
    assert Job.__dataclass_params__.frozen  # type: ignore[attr-defined]
