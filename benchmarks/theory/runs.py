"""The runs that formulae are held against: quorate's own simulated engine, with gradients where they matter."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quorate
from quorate.ledger import Ledger
from quorate.metrics import KthArrivals
from quorate.noise import Norms, signal_and_noise
from quorate.trace import Update

# ------------------------------------------------------------ times, without gradients


def summary(policy: quorate.Policy, workers: int, latency: Any, updates: int, **engine: Any) -> dict[str, Any]:
    return quorate.train(None, policy, quorate.Simulated(workers, latency, **engine), updates=updates).summary


def update_s(policy: quorate.Policy, workers: int, latency: Any, updates: int) -> float:
    return float(summary(policy, workers, latency, updates)["update_seconds"]["mean"])


def gradients_per_update(policy: quorate.Policy, workers: int, latency: str, updates: int) -> float:
    return float(summary(policy, workers, latency, updates)["tickets"]["applied"] / updates)


def kth_means(latency: str, n: int, rounds: int) -> list[float]:
    """Mean time of every arrival, from rounds that wait for all."""
    engine = quorate.Simulated(n, latency)
    return quorate.train(None, quorate.FullSync(), engine, updates=rounds).metrics.kth_arrival_means()


def as_measured_and_from_marginals(latency: str, n: int, k: int, rounds: int) -> tuple[float, float]:
    """Mean time of the k-th arrival as it was, and as if the same times had come independently of each other."""
    arrivals = KthArrivals()
    quorate.train(None, quorate.FullSync(), quorate.Simulated(n, latency), updates=rounds, recorders=(arrivals,))
    times = torch.tensor([list(column) for column in arrivals.times], dtype=torch.float64)  # [k, round]
    draws = torch.Generator().manual_seed(0)
    mixed = times.flatten()[torch.randint(times.numel(), (20_000, n), generator=draws)]
    return float(times[k - 1].mean()), float(mixed.sort(dim=1).values[:, k - 1].mean())


def best_share_in_draws(shift_over_mean: float, n: int, rounds: int) -> float:
    """The b/n with the most gradients a second, over drawn rounds."""
    draws = torch.Generator().manual_seed(0)
    times = shift_over_mean - torch.rand(rounds, n, generator=draws).clamp_min(1e-12).log()
    means = times.sort(dim=1).values.mean(0)
    return 1 - (int((torch.arange(1, n + 1) / means).argmax()) + 1) / n


# ------------------------------------------------------------ which samples are kept


def kept_share_without_ledger(n: int, quorum: int, slow: float, dependent: bool, rounds: int) -> float:
    """A loop that forgets what it drops: the share of slow samples among those kept."""
    draws = torch.Generator().manual_seed(0)
    is_slow = torch.rand(rounds, n, generator=draws) < slow
    times = torch.rand(rounds, n, generator=draws) + (is_slow * 2.0 if dependent else 0.0)
    kept = times.argsort(dim=1)[:, :quorum]
    return float(is_slow.gather(1, kept).float().mean())


class SlowBatches(quorate.Simulated):
    """One batch in five takes three times as long, whoever computes it."""

    def start(self, ticket: Any) -> None:
        self._is_slow = ticket.batch % 5 == 0
        super().start(ticket)

    def open(self, job: Any) -> None:
        super().open(job)
        draw = self._draw
        self._draw = lambda worker, step, row, now: draw(worker, step, row, now) + 2.0 * self._is_slow


class Kept(quorate.Recorder):
    """Which batches were applied."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def applied(self, time: float, update: Update) -> None:
        self.batches += [ticket.batch for ticket in update.tickets]


def kept_share_with_ledger(n: int, quorum: int, batches: int, epochs: int) -> float:
    kept = Kept()
    engine = SlowBatches(n, "shifted-exp:0.5,0.1")
    policy = quorate.BackupSync(quorum, n - quorum)
    quorate.train(None, policy, engine, epochs=epochs, samples=batches, batch_size=1, recorders=(kept,))
    return sum(batch % 5 == 0 for batch in kept.batches) / len(kept.batches)


def drops_until_the_ledger_pins(drop_rate: float) -> int:
    ledger = Ledger(None, 1)
    drops = 4096
    spent = round(drops / drop_rate) - drops - 1
    for number in range(spent):
        ledger.borrow(None)
        ledger.spend([quorate_ticket(number)])
    for _ in range(drops - 1):
        loan = ledger.borrow(None)
        assert loan is not None
        ledger.give_back(loan.batch)
        ledger._drops.clear()  # other batches' drops: they set the rate, no more
    times = 0
    while True:
        loan = ledger.borrow(None)
        assert loan is not None
        if loan.pinned:
            return times
        ledger.give_back(loan.batch)
        times += 1


def quorate_ticket(batch: int) -> Any:
    from quorate.events import Ticket

    return Ticket(batch, 0, 0, 0, batch, 1)


# ------------------------------------------------------------ training with known noise


class Quadratic:
    """F(θ) = ½‖θ‖², whose samples are gradients with known noise: θ + z, or θ·(1 + z) with noise in proportion."""

    batch_size = 1

    def __init__(self, eta: float, noise: Tensor, in_proportion: bool = False, start: float = 1.0) -> None:
        self.eta, self.noise, self.in_proportion, self.start = eta, noise, in_proportion, start

    def model(self) -> nn.Module:
        model = nn.Module()
        model.theta = nn.Parameter(torch.full((self.noise.shape[1],), self.start))
        return model

    def train_data(self) -> TensorDataset:
        return TensorDataset(self.noise)

    def loss(self, model: Any, batch: Any) -> Tensor:
        z = batch[0].mean(0)
        theta = model.theta
        factor = theta * theta / 2
        return ((factor * (1 + z)) if self.in_proportion else factor + theta * z).sum()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.eta)

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"gradient_sq": float(model.theta.detach().square().sum())}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def gradient_sq(task: Quadratic, policy: quorate.Policy, n: int, updates: int) -> list[float]:
    """‖∇F‖² after every update."""
    engine = quorate.Simulated(n, "shifted-exp:1,1")
    done = quorate.train(task, policy, engine, updates=updates, evaluate_every=1)
    return [one.measures["gradient_sq"] for one in done.metrics.evaluations]


def variance_of_kept_mean(quorum: int, backups: int, batch: int, sigma: float) -> float:
    """With a step of 1, θ is the mean noise of the last update: its square is that mean's variance."""
    dimensions, updates = 200, 60
    task = Quadratic(1.0, sigma * normal((quorum + backups) * batch * updates, dimensions))
    task.batch_size = batch
    found = gradient_sq(task, quorate.BackupSync(quorum, backups), quorum + backups, updates)
    return sum(found[1:]) / len(found[1:]) / dimensions


def mean_gradient_sq(quorum: int, backups: int, eta: float, sigma: float, updates: int) -> float:
    """(1/T) Σ ‖∇F‖² over T updates, in one dimension of many, so that one run is an average."""
    dimensions = 500
    task = Quadratic(eta, sigma * normal(quorum * updates, dimensions))
    found = gradient_sq(task, quorate.BackupSync(quorum, backups), quorum + backups, updates)
    return (dimensions * task.start**2 + sum(found[:-1])) / updates / dimensions


def updates_until(quorum: int, backups: int, noise_scale: float, target: float, step_share: float = 0.05) -> float:
    """Updates until ‖∇F‖² has fallen to `target`, with the step that suits the quorum, between two counts."""
    ratio = noise_scale / quorum
    expected = math.log(1 / target) * (1 + ratio) / (2 * step_share)
    updates = int(1.5 * expected) + 5
    dimensions = 3000
    noise = math.sqrt(noise_scale) * normal(quorum * updates, dimensions)
    task = Quadratic(step_share / (1 + ratio), noise, in_proportion=True)
    found = [
        one / dimensions for one in gradient_sq(task, quorate.BackupSync(quorum, backups), quorum + backups, updates)
    ]
    first = next(number for number, one in enumerate(found) if one <= target)
    before, after = math.log(found[first - 1]), math.log(found[first])
    return first + (before - math.log(target)) / (before - after)


def noise_scale_from_norms(noise_scale: float, batch: int, quorum: int) -> float:
    """From the squared norms of one arrival and of the mean, of gradients with known noise."""
    dimensions, rounds = 50, 4000
    truth = torch.ones(dimensions)
    sigma = math.sqrt(noise_scale * float(truth.square().sum()) / dimensions)
    gradients = truth + sigma / math.sqrt(batch) * normal(rounds, quorum, dimensions)
    signal = noise = 0.0
    for one, mean in zip(gradients[:, 0], gradients.mean(1), strict=True):
        norms = Norms(float(one.square().sum()), batch, float(mean.square().sum()), batch * quorum)
        more_signal, more_noise = signal_and_noise(norms)
        signal, noise = signal + more_signal, noise + more_noise
    return noise / signal


def largest_stable_step(delay: int) -> float:
    """The step at which gradients `delay` versions old begin to make θ grow, by halving an interval."""
    low, high = 0.0, 1.0
    for _ in range(7):
        eta = (low + high) / 2
        task = Quadratic(eta, torch.zeros(600, 1))
        try:
            found = gradient_sq(task, quorate.Delayed(delay), 1, 600)
            grows = not max(found[-100:]) < max(found[50:150])
        except quorate.Diverged:
            grows = True
        low, high = (low, eta) if grows else (eta, high)
    return (low + high) / 2
