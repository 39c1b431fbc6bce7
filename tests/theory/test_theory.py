"""docs/theory.md: each formula is held against a run, and none is without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.theory import formulas
from benchmarks.theory.cases import CASES, SPELLS, Case
from benchmarks.theory.runs import as_measured_and_from_marginals
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quorate
from quorate.latency import Lognormal, Pareto, order_statistic_mean
from quorate.ledger import Ledger

PAGE = (Path(__file__).parent.parent.parent / "docs" / "theory.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_does_as_the_formula_says(case: Case) -> None:
    predicted, simulated = case.predicted(), case.simulated()
    if case.relation == "≤":
        assert simulated <= predicted
        assert simulated > 0.25 * predicted, "a bound that says something"
    else:
        assert simulated == pytest.approx(predicted, rel=case.tolerance or 1e-12)


def test_every_formula_of_the_page_has_a_case_and_every_case_a_formula() -> None:
    on_page = [int(number) for number in re.findall(r"\*\*\((\d+)\)\*\*", PAGE)]
    assert on_page == list(range(1, len(on_page) + 1)), "numbered in order, each once"
    assert set(on_page) == {case.number for case in CASES}


def test_the_table_of_the_page_is_that_of_these_cases() -> None:
    rows = re.findall(r"^\| \((\d+)\) \| (.*?) \| (?:≤ )?([\d.e+-]+) \| ([\d.e+-]+) \|$", PAGE, flags=re.MULTILINE)
    assert [(int(number), what) for number, what, *_ in rows] == [(case.number, case.what) for case in CASES]
    for (_, _, predicted, simulated), case in zip(rows, CASES, strict=True):
        assert predicted == f"{case.predicted():.4g}", case.name
        if case.relation == "=":  # what was written down once passes the same test as today's run
            assert float(simulated) == pytest.approx(float(predicted), rel=max(case.tolerance, 1e-4)), case.name


def test_numbers_in_the_text() -> None:
    assert formulas.best_share_of_backups(10) == pytest.approx(0.073, abs=5e-4)
    assert formulas.best_share_of_backups(1) == pytest.approx(0.32, abs=5e-3)
    assert formulas.slow_share_without_ledger(8, 6, 0.2) == pytest.approx(0.045, abs=5e-4)
    assert formulas.delay_limit(0) == pytest.approx(2.0)
    assert formulas.delay_limit(1000) == pytest.approx(torch.pi / 2000, rel=1e-3)
    for sigma, low in ((0.2, 0.01), (0.5, 0.045), (1.0, 0.18)):  # the lognormal approximation
        off = [
            1 - formulas.kth_of_lognormal(1, sigma, n, k) / order_statistic_mean(Lognormal(1, sigma), n, k)
            for n, k in ((8, 8), (8, 6), (100, 96), (100, 100))
        ]
        assert 0.4 * low < max(off) < low
        assert min(off) > 0
    alpha = 0.4  # one backup more than 1/α − 1 = 1.5
    assert [order_statistic_mean(Pareto(1, alpha), 10, 10 - b) < float("inf") for b in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_marginals_promise_what_shared_spells_do_not_give() -> None:
    last, last_composed = as_measured_and_from_marginals(SPELLS, 16, 16, 2000)
    fewer, fewer_composed = as_measured_and_from_marginals(SPELLS, 16, 14, 2000)
    assert last / fewer == pytest.approx(1.13, abs=0.02)
    assert last_composed / fewer_composed == pytest.approx(2.7, abs=0.2)


# ------------------------------------------------------------ bias in a real training


class MeanOfLabels:
    """Least squares with one parameter: what it learns is the mean label, weighted as the samples were used."""

    batch_size = 1
    labels = torch.tensor([1.0] * 60 + [0.0] * 240)  # a fifth of the samples, and those are slow

    def model(self) -> nn.Module:
        model = nn.Module()
        model.theta = nn.Parameter(torch.zeros(1))
        return model

    def train_data(self) -> TensorDataset:
        return TensorDataset(self.labels)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return (model.theta - batch[0]).square().mean() / 2

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.02)

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"theta": float(model.theta)}


class SlowSamples(quorate.Simulated):
    """Labels of 1 take longer, whoever computes them."""

    def open(self, job: Any) -> None:
        super().open(job)
        draw = self._draw
        self._draw = lambda worker, step, row, now: draw(worker, step, row, now) + (2.0 if self._slow else 0.0)

    def start(self, ticket: Any) -> None:
        self._slow = self._orders.indices(ticket.batch)[0] < 60
        super().start(ticket)

    _orders = Ledger(300, 1, seed=0)


def learned() -> float:
    """Where the parameter settles: its mean over the last epochs."""
    engine = SlowSamples(8, "shifted-exp:0.5,0.1")
    run = quorate.train(MeanOfLabels(), quorate.BackupSync(6, 2), engine, updates=900, evaluate_every=5)
    values = [one.measures["theta"] for one in run.metrics.evaluations]
    return sum(values[-60:]) / 60


def test_the_ledger_repairs_what_forgetting_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ledger = learned()
    forget = Ledger.give_back

    def forgetful(self: Ledger, batch: int) -> None:
        forget(self, batch)
        self._returned.pop()

    monkeypatch.setattr(Ledger, "give_back", forgetful)
    without = learned()
    assert with_ledger == pytest.approx(0.2, abs=0.02)
    # Formula (2) for independent draws; an epoch without replacement, whose leftovers are rarer, comes close.
    assert without == pytest.approx(formulas.slow_share_without_ledger(8, 6, 0.2), abs=0.02)
