"""What Chen et al. published of 100 workers, to stand beside what we get.

Source: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, Revisiting Distributed Synchronous SGD (arXiv 1604.00981,
ICLR 2017 submission), figures 3 to 6: Inception on 100 workers with a K40 each. Read off the figures, about ±0.015 s.
"""

from __future__ import annotations

from experiments.published import CHEN

WORKERS = 100
#: Figure 3: seconds until the k-th gradient of a round is there, by the share of rounds that are as quick.
LEVELS: tuple[float, ...] = tuple(CHEN["levels"])
TIME_QUANTILES_S: dict[int, tuple[float, ...]] = {
    int(k): tuple(seconds) for k, seconds in CHEN["fig3_time_quantiles_s"].items()
}
#: Figure 4: mean seconds until the k-th gradient.
MEAN_S: dict[int, float] = {int(k): mean for k, mean in CHEN["fig4_mean_time_to_kth_gradient_s"].items()}
#: Figure 5: thousands of updates until the net has converged, when an update is made of N gradients.
ITERATIONS_THOUSANDS: dict[int, float] = {int(n): value for n, value in CHEN["fig5_iterations_thousands"].items()}
#: They fall about as N^-0.85.
POWER: float = CHEN["fig5_power"]
#: Figure 6: the product of the two, as hours, when N of the 100 workers make the quorum.
HOURS: dict[int, float] = {int(n): hours for n, hours in CHEN["fig6_hours_digitised"].items()}
BEST_QUORUM = min(HOURS, key=lambda quorum: HOURS[quorum])


def iterations(quorum: int) -> float:
    """Updates to convergence with this quorum: the curve N^-0.85 through the published value at N = 100."""
    return 1000 * ITERATIONS_THOUSANDS[WORKERS] * float((quorum / WORKERS) ** -POWER)
