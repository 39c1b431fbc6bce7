"""The PixelCNN: probabilities that are probabilities, nothing seen ahead of time, and the task made of it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import quorate
from quorate.tasks.pixelcnn import Mixture, PixelCnn, PixelNet, all_log_probabilities, sample

SIZE = 7


def made_up(samples: int, seed: int = 0) -> TensorDataset:
    draws = torch.Generator().manual_seed(seed)
    grey = torch.randint(60, 200, (samples, 1, 1, 1), generator=draws)
    noise = torch.randint(-9, 10, (samples, 3, SIZE, SIZE), generator=draws)
    return TensorDataset((grey + noise).to(torch.uint8), torch.zeros(samples))


def small_task(**options: Any) -> PixelCnn:
    return PixelCnn((made_up(40), made_up(10, 1)), channels=8, layers=2, mixtures=2, test_samples=10, **options)


def restless(net: PixelNet) -> PixelNet:
    """A net with weights so large that every possible dependence shows."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return net.double()


# ---------------------------------------------------------------- probabilities


def test_probabilities_of_all_values_sum_to_one() -> None:
    net = restless(PixelNet(4, 2, 3))
    images = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8)
    chances = all_log_probabilities(net(images.double())).exp()
    assert chances.shape == (2, 256, 3, SIZE, SIZE)
    assert chances.min() >= 0
    torch.testing.assert_close(chances.sum(1), torch.ones(2, 3, SIZE, SIZE, dtype=torch.float64))


@pytest.mark.parametrize("log_scale", [-7.0, -1.0, 3.0])
def test_a_value_has_the_mass_of_its_bin(log_scale: float) -> None:
    """Against differences of the logistic distribution itself, in double precision, and the rest beyond both ends."""
    scale, mean = math.exp(log_scale), 0.1
    one = torch.full((1, 1, 1, 1, 1), 1.0, dtype=torch.float64)
    mixture = Mixture(0 * one, mean * one, log_scale * one)
    found = all_log_probabilities(mixture).exp().flatten().tolist()
    edges = [(value + 0.5) / 127.5 - 1 for value in range(255)]
    cumulative = [0.0, *(1 / (1 + math.exp(min(700, (mean - edge) / scale))) for edge in edges), 1.0]
    expected = [after - before for before, after in pairwise(cumulative)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_far_from_its_mean_a_value_still_has_a_finite_loss_and_gradient() -> None:
    means = torch.full((1, 1, 1, 1, 1), -40.0, requires_grad=True)
    mixture = Mixture(torch.zeros(1, 1, 1, 1, 1), means, torch.full((1, 1, 1, 1, 1), -7.0))
    log_probability = mixture.log_probability(torch.full((1, 1, 1, 1), 200, dtype=torch.uint8)).sum()
    log_probability.backward()
    assert means.grad is not None
    assert math.isfinite(log_probability.item()) and 0 < means.grad.item() < math.inf


# ---------------------------------------------------------------- what is seen


def seen_by(row: int, column: int, colour: int) -> torch.Tensor:
    """Whether the prediction of a value depends on each other value: [3, h, w]."""
    images = torch.full((1, 3, SIZE, SIZE), 100.0, dtype=torch.float64, requires_grad=True)
    mixture = restless(PixelNet(4, 4, 2))(images)
    foretold = sum(part[0, colour, :, row, column].sum() for part in mixture)
    (gradient,) = torch.autograd.grad(foretold, images)
    return gradient[0] != 0


@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 4), (3, 0), (3, 3), (6, 6)])
@pytest.mark.parametrize("colour", [0, 1, 2])
def test_nothing_is_foretold_from_what_comes_later(row: int, column: int, colour: int) -> None:
    seen = seen_by(row, column, colour)
    places = torch.arange(SIZE * SIZE).view(SIZE, SIZE)
    assert not seen[:, places > places[row, column]].any()
    assert not seen[colour:, row, column].any()
    assert seen[:colour, row, column].all()


def test_there_is_no_blind_spot() -> None:
    """The net sees all earlier values, also above to the right, which one stack of masked convolutions would miss."""
    seen = seen_by(4, 3, 0)
    assert seen[:, :4].all() and seen[:, 4, :3].all()


def test_samples_follow_the_probabilities() -> None:
    """A net whose head is set to two sharp values draws only those; each from its own picture so far."""
    torch.manual_seed(0)
    net = PixelNet(4, 1, 2)
    with torch.no_grad():
        net.head.weight.zero_()
        logits, means, log_scales, added = net.head.bias.view(4, 3, 2)  # type: ignore[union-attr]
        logits.zero_()
        means.copy_(torch.tensor([10.0, 250.0]) / 127.5 - 1)
        log_scales.fill_(-7.0)
        added.zero_()
    images = sample(net, 20, 4)
    assert images.shape == (20, 3, 4, 4) and images.dtype == torch.uint8
    low, high = (((images.int() - value).abs() <= 2) for value in (10, 250))
    assert 0.3 < low.float().mean() < 0.7 and (low | high).all()


# ---------------------------------------------------------------- the task


def test_the_first_loss_is_near_eight_bits_and_falls() -> None:
    task = small_task(lr=3e-3)
    result = quorate.train(task, quorate.BackupSync(2, 1), quorate.Simulated(3), updates=40, evaluate_every=1)
    nll = [one.measures["nll"] for one in result.metrics.evaluations]
    assert 7 < nll[0] < 9 and nll[-1] < nll[0] - 1


def test_it_runs_on_local_workers() -> None:
    result = quorate.train(small_task(), quorate.BackupSync(1, 1), quorate.Local(2), updates=3)
    assert math.isfinite(result.evaluation["nll"])


def test_a_round_may_be_one_batch() -> None:
    result = quorate.train(small_task(), quorate.FullSync(), quorate.Simulated(3, together=True), updates=2)
    assert result.metrics.header["engine"]["arithmetic"].startswith("together")


def test_the_rate_rises_and_falls_once() -> None:
    task = small_task(updates=100)
    assert [task.share_of_lr(version) for version in (0, 1, 2, 79)] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert [task.share_of_lr(version) for version in (80, 100)] == [0.03, 0.03]
    assert small_task().share_of_lr(10**6) == 1.0


def test_the_nll_is_over_all_test_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    task = small_task()
    torch.manual_seed(0)
    model = task.model()
    whole = task.evaluate(model)["nll"]
    monkeypatch.setattr("quorate.tasks.pixelcnn._AT_ONCE", 3)
    assert task.evaluate(model)["nll"] == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"precision": "bfloat16"}, "precision 'bfloat16' is not known; choose one of: float32, tf32"),
        ({"updates": 0}, "updates is 0, but it must be at least 1"),
        ({"drop_share": 2.0}, "drop_share 2.0, but shares of a training are 0 to 1"),
        ({"train_samples": 1000}, "train_samples is 1000, but there are 40"),
    ],
)
def test_bad_input(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(quorate.BadInput, match=sentence):
        small_task(**options)


def test_a_ready_task() -> None:
    assert quorate.task.READY_TASKS["pixelcnn"] == "quorate.tasks.pixelcnn:PixelCnn"


def test_whatever_the_net_says_the_loss_is_finite() -> None:
    task = small_task()
    torch.manual_seed(0)
    model = task.model()
    with torch.no_grad():
        model.head.bias.copy_(1e4 * torch.randn_like(model.head.bias))  # type: ignore[union-attr, operator]
    loss = task.loss(model, task.train_data()[:4])
    loss.backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(loss.item())
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
