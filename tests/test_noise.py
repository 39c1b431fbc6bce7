"""The gradient noise scale: its estimate is unbiased, measuring does not change a run, and a replay agrees."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quorate
from quorate.engines.shared import update
from quorate.engines.simulated import synchronous
from quorate.noise import EVERY, NoiseScale, Norms, is_measured, signal_and_noise
from quorate.trace import read_trace
from tests.toy_tasks import Toy, batch_norm_net, plain_sgd

# ---------------------------------------------------------------- the estimator


def drawn(draws: random.Random, gradient: list[float], spread: float, one: int, arrivals: int) -> Norms:
    """Norms of gradients with a known mean, each element of one sample with the variance spread²."""
    means = [[draws.gauss(mu, spread / one**0.5) for mu in gradient] for _ in range(arrivals)]
    mean = [fmean(column) for column in zip(*means, strict=True)]
    return Norms(sum(x * x for x in means[0]), one, sum(x * x for x in mean), one * arrivals)


def test_both_estimates_are_unbiased() -> None:
    draws, gradient, spread = random.Random(5), [0.3] * 10, 2.0
    found = [signal_and_noise(drawn(draws, gradient, spread, 4, 6)) for _ in range(4000)]
    for estimates, truth in zip(zip(*found, strict=True), (0.9, 40.0), strict=True):
        error = stdev(estimates) / len(estimates) ** 0.5
        assert abs(fmean(estimates) - truth) < 4 * error
        assert error < 0.05 * truth  # else the assertion above proves nothing


def test_the_running_estimate_comes_near_and_follows_a_change() -> None:
    draws, noise = random.Random(6), NoiseScale()
    for spread in (1.0, 3.0):
        values = []
        for step in range(400):
            noise.add(drawn(draws, [0.5] * 40, spread, 8, 8))
            if step >= 200 and noise.value is not None:
                values.append(noise.value)
        assert len(values) > 150
        assert fmean(values) == pytest.approx(spread**2 / 0.25, rel=0.2)


def test_it_is_not_known_before_it_is() -> None:
    noise = NoiseScale()
    assert noise.value is None
    for _ in range(10):
        noise.add(Norms(8.0, 4, 1.0, 32))  # S·‖mean‖² = B·‖first‖²: nothing but noise
    assert noise.value is None
    noise = NoiseScale()
    for _ in range(10):
        noise.add(Norms(1.0, 4, 1.0 + 1e-9, 32))  # no noise at all, but for rounding
    assert noise.value == 0.0


@pytest.mark.parametrize(
    "norms", [Norms(1.0, 4, 1.0, 4), Norms(float("inf"), 4, 1.0, 8), Norms(1.0, 4, float("nan"), 8)]
)
def test_norms_that_say_nothing_are_passed_over(norms: Norms) -> None:
    noise = NoiseScale()
    before = noise.state()
    noise.add(norms)
    assert noise.state() == before and not norms.is_usable


def test_its_state_goes_through_json() -> None:
    draws, noise, other = random.Random(7), NoiseScale(), NoiseScale()
    for _ in range(10):
        noise.add(drawn(draws, [1.0], 1.0, 2, 2))
    other.restore(json.loads(json.dumps(noise.state())))
    last = drawn(draws, [1.0], 1.0, 2, 2)
    noise.add(last)
    other.add(last)
    assert other.value == noise.value is not None


# ---------------------------------------------------------------- the engines


class Regression:
    """Least squares that never moves, so that its gradient and its noise are known exactly."""

    batch_size, samples = 4, 4096

    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(2)
        x = torch.randn(self.samples, 6, generator=draws)
        y = x @ torch.full((6, 1), 0.3) + torch.randn(self.samples, 1, generator=draws)
        self.data = TensorDataset(x, y)
        gradients = x * (-2 * y)  # of (w·x − y)² at w = 0
        self.signal = float(gradients.mean(0).square().sum())
        self.noise = float(gradients.var(0).sum())

    def model(self) -> nn.Module:
        model = nn.Linear(6, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def train_data(self) -> Any:
        return self.data

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().mean()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)


ENGINES: dict[str, tuple[Callable[[], quorate.Engine], quorate.Policy, str]] = {
    "summed": (lambda: quorate.Simulated(6), quorate.BackupSync(5, 1), "summed"),
    "together": (lambda: quorate.Simulated(6, together=True), quorate.BackupSync(5, 1), "together"),
    "kept": (lambda: quorate.Simulated(6), quorate.SoftSync(5), "kept"),
    "local": (lambda: quorate.Local(3), quorate.FullSync(), "kept"),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", ENGINES)
def test_engines_measure_the_right_noise(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronous, "_MEASURE_EVERY", EVERY)
    make, policy, arithmetic = ENGINES[name]
    task = Regression()
    quorate.train(task, policy, make(), updates=2400, evaluate_every=10_000, out=tmp_path / "run")
    records = list(read_trace(tmp_path / "run"))
    assert records[0]["engine"]["arithmetic"] == arithmetic
    applied = [record for record in records if record["event"] == "apply"]
    with_norms = [record for record in applied if "norms" in record]
    assert [one["version"] - 1 for one in with_norms] == [version for version in range(2400) if is_measured(version)]
    found = [signal_and_noise(Norms(*record["norms"])) for record in with_norms]
    for estimates, truth in zip(zip(*found, strict=True), (task.signal, task.noise), strict=True):
        error = stdev(estimates) / len(estimates) ** 0.5
        assert abs(fmean(estimates) - truth) < 4 * error
        assert error < 0.4 * truth
    known = [record["noise_scale"] for record in with_norms if record["noise_scale"] is not None]
    # Real workers arrive in another order each time, so how often the gradient stands out from its noise varies.
    assert len(known) > len(with_norms) / 2 and all(value >= 0 for value in known)
    again = NoiseScale()
    for record in with_norms:
        again.add(Norms(*record["norms"]))
        assert again.value == record["noise_scale"]
    assert "noise_scale" not in applied[5]


@pytest.mark.parametrize("policy", [quorate.Async(), quorate.SoftSync(3, staleness_weights=True)], ids=repr)
def test_single_or_weighted_gradients_are_not_measured(policy: quorate.Policy, tmp_path: Path) -> None:
    quorate.train(Toy(), policy, quorate.Simulated(4, "lognormal:1,1"), updates=30, out=tmp_path / "run")
    assert not any("norms" in record for record in read_trace(tmp_path / "run"))


def test_an_update_that_left_something_out_is_not_measured(tmp_path: Path) -> None:
    task = Toy()
    task.data.tensors[0][17] = float("inf")
    quorate.train(task, quorate.FullSync(), quorate.Simulated(2), epochs=4, out=tmp_path / "run")
    records = [record for record in read_trace(tmp_path / "run") if record["event"] == "apply"]
    assert any("norms" in record for record in records)
    assert all(len(record["tickets"]) == 2 for record in records if "norms" in record)


@pytest.mark.parametrize("engine", [lambda: quorate.Simulated(3), lambda: quorate.Simulated(3, together=True)])
def test_measuring_changes_nothing_in_process(
    engine: Callable[[], quorate.Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest() -> str | None:
        return quorate.train(Toy(batch_norm_net), quorate.FullSync(), engine(), updates=40).digest

    measured = digest()
    monkeypatch.setattr(synchronous, "is_measured", lambda *version: False)
    assert digest() == measured is not None


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("optimizer", [plain_sgd, None])
def test_measuring_changes_nothing_in_local_processes(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Toy(batch_norm_net) if optimizer is None else Toy(batch_norm_net, optimizer)

    def digest() -> str | None:  # of one order of arrivals: worker 1 is always the second
        engine = quorate.Local(2, latency="constant:0.001*slow:1=8")
        return quorate.train(task, quorate.FullSync(), engine, updates=20).digest

    measured = digest()
    monkeypatch.setattr(update, "is_measured", lambda *version: False)
    assert digest() == measured is not None


# ---------------------------------------------------------------- replay and resume


def test_a_replay_has_the_same_with_gradients_and_without(tmp_path: Path) -> None:
    quorate.train(
        Toy(), quorate.BackupSync(3, 1), quorate.Simulated(4, "lognormal:1,1"), epochs=8, out=tmp_path / "run"
    )
    records = list(read_trace(tmp_path / "run"))
    assert any(record.get("noise_scale") is not None for record in records)
    assert quorate.replay(tmp_path / "run", Toy()).gradients
    assert not quorate.replay(tmp_path / "run", gradients=False).gradients
    for record in records:
        if record.get("noise_scale") is not None:
            record["noise_scale"] *= 1.01
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(quorate.ReplayMismatch, match="noise_scale"):
        quorate.replay(tmp_path / "other.jsonl", gradients=False)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_trace_of_schema_1_is_replayed(gradients: bool, tmp_path: Path) -> None:
    quorate.train(
        Toy(), quorate.BackupSync(3, 1), quorate.Simulated(4, "lognormal:1,1"), epochs=2, out=tmp_path / "run"
    )
    with (tmp_path / "old.jsonl").open("w") as old:
        for record in read_trace(tmp_path / "run"):
            if record["event"] == "run":
                record["schema"] = 1
            record.pop("norms", None)
            record.pop("noise_scale", None)
            old.write(json.dumps(record) + "\n")
    assert quorate.replay(tmp_path / "old.jsonl", Toy(), gradients=gradients).lines > 20


@pytest.mark.usefixtures("warm")
def test_a_resumed_run_goes_on_with_what_it_knew(tmp_path: Path) -> None:
    """The whole trace replays as one run, and a replay has all norms; so the resumed run must have had them too."""
    quorate.train(Toy(), quorate.FullSync(), quorate.Local(2), updates=30, out=tmp_path / "run")
    quorate.resume(tmp_path / "run", Toy(), updates=80)
    applied = [record for record in read_trace(tmp_path / "run") if "norms" in record]
    assert {record["version"] > 30 for record in applied} == {True, False}
    assert quorate.replay(tmp_path / "run", Toy()).result.digest is not None
