"""Each numbered formula with a run that it should predict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.theory import formulas, runs
from quorate import Async, BackupSync, Deadline, FullSync, KBatchSync, SoftSync
from quorate.latency import Independent, parse_latency


@dataclass(frozen=True)
class Case:
    """A formula's value, the run's, and how far apart they may be; `relation` is "=" or "≤" (run ≤ formula)."""

    number: int
    what: str
    predicted: Callable[[], float]
    simulated: Callable[[], float]
    tolerance: float
    relation: str = "="

    @property
    def name(self) -> str:
        return f"({self.number}) {self.what}"


def law(text: str) -> Independent:
    found = parse_latency(text)
    assert isinstance(found, Independent)
    return found


SPELLS = "shifted-exp:0.9,0.1*spells:1000,200,5"
_PHI, _MEAN_FACTOR = formulas.shared_slowness(0.2, 5)

CASES = [
    # ---------------------------------------------------------------- what an update is made of
    Case(
        1,
        "share of a fifth of the samples among those kept, 6+2, times independent of the sample",
        lambda: 0.2,
        lambda: runs.kept_share_without_ledger(8, 6, 0.2, dependent=False, rounds=40_000),
        0.01,
    ),
    Case(
        2,
        "the same, that fifth always slower, nothing given back",
        lambda: formulas.slow_share_without_ledger(8, 6, 0.2),
        lambda: runs.kept_share_without_ledger(8, 6, 0.2, dependent=True, rounds=40_000),
        0.03,
    ),
    Case(
        3,
        "the same with the ledger, 5 epochs of 400 batches",
        lambda: 0.2,
        lambda: runs.kept_share_with_ledger(8, 6, 400, 5),
        1e-9,
    ),
    Case(
        4,
        "drops in a row until a batch is pinned, a quarter of all being dropped",
        lambda: formulas.drops_until_pinned(0.25),
        lambda: runs.drops_until_the_ledger_pins(0.25),
        0.0,
    ),
    Case(
        5,
        "variance of the kept mean, 6+0, B = 4, σ = 3",
        lambda: formulas.variance_of_the_mean(9, 6, 4),
        lambda: runs.variance_of_kept_mean(6, 0, 4, 3.0),
        0.05,
    ),
    Case(
        5,
        "the same, 6+2",
        lambda: formulas.variance_of_the_mean(9, 6, 4),
        lambda: runs.variance_of_kept_mean(6, 2, 4, 3.0),
        0.05,
    ),
    Case(
        6,
        "mean ‖∇F‖² of 300 updates, quadratic, η = 0.1, σ = 4, 6+2",
        lambda: formulas.rate_bound(0.5, 0.1, 1.0, 16.0, 6, 1, 300),
        lambda: runs.mean_gradient_sq(6, 2, 0.1, 4.0, 300),
        0.0,
        "≤",
    ),
    Case(
        7,
        "updates to a tenth of ‖∇F‖², 4+2 over 16+0, B_noise = 16 batches",
        lambda: formulas.updates_to_target(16, 4, 1) / formulas.updates_to_target(16, 16, 1),
        lambda: runs.updates_until(4, 2, 16, 0.1) / runs.updates_until(16, 0, 16, 0.1),
        0.06,
    ),
    Case(
        8,
        "B_noise from norms, N = 6, B = 4",
        lambda: 100.0,
        lambda: runs.noise_scale_from_norms(100, 4, 6),
        0.05,
    ),
    Case(
        9,
        "largest stable ηL with gradients 3 versions old",
        lambda: formulas.delay_limit(3),
        lambda: runs.largest_stable_step(3),
        0.03,
    ),
    # ---------------------------------------------------------------- seconds per update
    Case(
        10,
        "14+2, quantiles:0.05@0,0.06@0.5,0.2@1",
        lambda: formulas.kth_of_any_law(law("quantiles:0.05@0,0.06@0.5,0.2@1"), 16, 14),
        lambda: runs.update_s(BackupSync(14, 2), 16, "quantiles:0.05@0,0.06@0.5,0.2@1", 4000),
        0.01,
    ),
    Case(
        11,
        "96+4, Exp(1)",
        lambda: formulas.kth_of_shifted_exponential(0, 1, 100, 96),
        lambda: runs.update_s(BackupSync(96, 4), 100, "shifted-exp:0,1", 1500),
        0.02,
    ),
    Case(
        12,
        "28+4, Pareto(1, 1.5)",
        lambda: formulas.kth_of_pareto(1, 1.5, 32, 28),
        lambda: runs.update_s(BackupSync(28, 4), 32, "pareto:1,1.5", 4000),
        0.02,
    ),
    Case(
        12,
        "14+6, Pareto(1, 0.8): no worker's own mean is finite",
        lambda: formulas.kth_of_pareto(1, 0.8, 20, 14),
        lambda: runs.update_s(BackupSync(14, 6), 20, "pareto:1,0.8", 6000),
        0.03,
    ),
    Case(
        13,
        "28+4, lognormal, s = 0.5",
        lambda: formulas.kth_of_lognormal(1, 0.5, 32, 28),
        lambda: runs.update_s(BackupSync(28, 4), 32, "lognormal:1,0.5", 2000),
        0.02,
    ),
    Case(
        14,
        "14+2, one in twenty pauses, ×10",
        lambda: formulas.kth_of_pauses(1, 0.05, 10, 16, 14),
        lambda: runs.update_s(BackupSync(14, 2), 16, "pause:1,0.05,10", 8000),
        0.06,
    ),
    Case(
        15,
        "12+4, Exp(1), late work left to finish",
        lambda: formulas.left_to_finish_exponential(1, 16, 12),
        lambda: runs.update_s(BackupSync(12, 4, late="finish"), 16, "shifted-exp:0,1", 6000),
        0.02,
    ),
    Case(
        16,
        "k-batch, K = 12 on 16 workers, Exp(1)",
        lambda: formulas.k_batch_exponential(12, 1, 16),
        lambda: runs.update_s(KBatchSync(12), 16, "shifted-exp:0,1", 4000),
        0.02,
    ),
    Case(
        17,
        "async, 16 workers, 0.5 + Exp(0.5)",
        lambda: formulas.arrivals_in_groups(1, 1, 16),
        lambda: runs.update_s(Async(), 16, "shifted-exp:0.5,0.5", 40_000),
        0.01,
    ),
    Case(
        17,
        "softsync of 4, the same",
        lambda: formulas.arrivals_in_groups(4, 1, 16),
        lambda: runs.update_s(SoftSync(4), 16, "shifted-exp:0.5,0.5", 10_000),
        0.01,
    ),
    Case(
        18,
        "mean staleness, async, 16 workers",
        lambda: formulas.staleness_in_groups(1, 16),
        lambda: runs.summary(Async(), 16, "lognormal:1,0.5", 20_000)["staleness"]["mean"],
        0.01,
    ),
    Case(
        18,
        "mean staleness, softsync of 4, 16 workers",
        lambda: formulas.staleness_in_groups(4, 16),
        lambda: runs.summary(SoftSync(4), 16, "lognormal:1,0.5", 5000)["staleness"]["mean"],
        0.01,
    ),
    Case(
        19,
        "deadline of 2 s, 16 workers, 0.5 + Exp(0.5): seconds",
        lambda: formulas.deadline_seconds_exponential(0.5, 0.5, 2, 16),
        lambda: runs.update_s(Deadline(2.0, min_quorum=1), 16, "shifted-exp:0.5,0.5", 4000),
        0.01,
    ),
    Case(
        20,
        "the same: gradients an update",
        lambda: formulas.deadline_gradients_exponential(0.5, 0.5, 2, 16),
        lambda: runs.gradients_per_update(Deadline(2.0, min_quorum=1), 16, "shifted-exp:0.5,0.5", 4000),
        0.01,
    ),
    Case(
        21,
        f"full sync, 16 workers, {SPELLS}",
        lambda: _MEAN_FACTOR * formulas.kth_of_shifted_exponential(0.9, 0.1, 16, 16),
        lambda: runs.update_s(FullSync(), 16, SPELLS, 8000),
        0.02,
    ),
    # ---------------------------------------------------------------- choosing b, and what it costs
    Case(
        22,
        "best quorum of 16, 0.2 + Exp(0.1), noise-dominated",
        lambda: formulas.best_quorum(
            [formulas.kth_of_shifted_exponential(0.2, 0.1, 16, k) for k in range(1, 17)], math.inf
        ),
        lambda: formulas.best_quorum(runs.kth_means("shifted-exp:0.2,0.1", 16, 4000), math.inf),
        0.0,
    ),
    Case(
        22,
        "the same, B_noise = 8 batches",
        lambda: formulas.best_quorum([formulas.kth_of_shifted_exponential(0.2, 0.1, 16, k) for k in range(1, 17)], 8),
        lambda: formulas.best_quorum(runs.kth_means("shifted-exp:0.2,0.1", 16, 4000), 8),
        0.0,
    ),
    Case(
        23,
        "best b/n, Δμ = 10, 500 workers",
        lambda: formulas.best_share_of_backups(10),
        lambda: runs.best_share_in_draws(10, 500, 6000),
        0.1,
    ),
    Case(
        24,
        "share of compute wasted, 14+2, 0.5 + Exp(0.5)",
        lambda: formulas.wasted_share(law("shifted-exp:0.5,0.5"), 16, 14),
        lambda: _wasted(14, 2, "shifted-exp:0.5,0.5"),
        0.02,
    ),
    Case(
        25,
        "MB an update, 14+2, 1 MB parameters",
        lambda: formulas.bytes_per_update(16, 14, 1_000_000) / 1e6,
        lambda: _megabytes(14, 2, 1_000_000),
        0.001,
    ),
]


def _wasted(quorum: int, backups: int, latency: str) -> float:
    found = runs.summary(BackupSync(quorum, backups), quorum + backups, latency, 4000)["worker_seconds"]
    return float(found["wasted"] / found["compute"])


def _megabytes(quorum: int, backups: int, size: int) -> float:
    policy, n = BackupSync(quorum, backups), quorum + backups
    found = runs.summary(policy, n, "shifted-exp:0.5,0.5", 2000, model_bytes=size)
    return float(found["bytes"]["sent"] / 2000 / 1e6)
