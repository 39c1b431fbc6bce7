"""What Chen et al. published of 100 workers, to stand beside what we get.

Source: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, Revisiting Distributed Synchronous SGD (arXiv 1604.00981,
ICLR 2017 submission), figures 3 to 6: Inception on 100 workers with a K40 each. Read off the figures, about ±0.015 s.
"""

from __future__ import annotations


def _seconds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


WORKERS = 100
#: Figure 3: seconds until the k-th gradient of a round is there, by the share of rounds that are as quick.
LEVELS = (
    0.02, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99,
)  # fmt: skip
TIME_QUANTILES_S = {
    1: _seconds("1.325 1.355 1.37 1.37 1.377 1.385 1.385 1.385 1.4 1.415 1.43 1.445 1.46 1.475 1.49 1.505 1.52 1.535"),
    50: _seconds("1.43 1.453 1.482 1.52 1.528 1.535 1.55 1.565 1.58 1.61 1.625 1.655 1.7 1.76 1.835 1.865 1.887 1.917"),
    90: _seconds(
        "1.475 1.52 1.558 1.595 1.61 1.61 1.633 1.655 1.67 1.715 1.73 1.775 1.835 1.917 2.007 2.053 2.098 2.158"
    ),
    97: _seconds(
        "1.49 1.55 1.58 1.625 1.633 1.64 1.663 1.685 1.715 1.775 1.82 1.873 1.94 2.015 2.112 2.195 2.255 2.322"
    ),
    98: _seconds(
        "1.512 1.565 1.61 1.64 1.655 1.663 1.685 1.715 1.768 1.873 1.94 2.007 2.083 2.188 2.337 2.442 2.525 2.645"
    ),
    99: _seconds(
        "1.558 1.603 1.645 1.663 1.677 1.692 1.73 1.797 1.94 2.127 2.217 2.322 2.442 2.585 2.788 2.893 2.99 3.14"
    ),
    100: _seconds(
        "1.64 1.655 1.685 1.73 1.782 1.97 2.428 2.593 2.728 2.817 2.855 2.96 3.103 3.312 3.665 4.05 4.45 5.95"
    ),
}
#: Figure 4: mean seconds until the k-th gradient.
MEAN_S = {
    1: 1.425, 5: 1.465, 10: 1.49, 20: 1.53, 30: 1.56, 40: 1.588, 50: 1.613, 60: 1.637, 70: 1.66, 80: 1.685, 90: 1.713,
    94: 1.73, 95: 1.735, 96: 1.742, 97: 1.775, 98: 1.842, 99: 2.005, 100: 2.62,
}  # fmt: skip
#: Figure 5: thousands of updates until the net has converged, when an update is made of N gradients.
ITERATIONS_THOUSANDS = {50: 137.5, 70: 99.8, 80: 91.1, 90: 82.5, 100: 76.2}
#: They fall about as N^-0.85.
POWER = 0.85
#: Figure 6: the product of the two, as hours, when N of the 100 workers make the quorum.
HOURS = {
    50: 61.5, 60: 53.7, 70: 46.0, 80: 42.6, 90: 39.2, 95: 38.15, 96: 38.05, 97: 38.4, 98: 39.6, 99: 42.8, 100: 55.5,
}  # fmt: skip
BEST_QUORUM = 96


def iterations(quorum: int) -> float:
    """Updates to convergence with this quorum: the curve N^-0.85 through the published value at N = 100."""
    return 1000 * ITERATIONS_THOUSANDS[WORKERS] * float((quorum / WORKERS) ** -POWER)
