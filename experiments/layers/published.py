"""What Chen et al. saw in a real asynchronous run.

Source: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, Revisiting Distributed Synchronous SGD (arXiv 1604.00981),
on the staleness of asynchronous training: 40 workers, an Inception net of 18 layers, parameters on servers.
"""

from __future__ import annotations

from typing import NamedTuple

WORKERS = 40
LAYERS = 18


class Seen(NamedTuple):
    """Staleness of a layer in updates; where the paper gives no range it is NaN."""

    mean: float
    lowest: float
    highest: float


#: By layer, from 1 at the bottom (the pictures) to 18 at the top (the loss).
STALENESS = {
    1: Seen(39.0, 24, 61),
    11: Seen(19.8, float("nan"), float("nan")),
    12: Seen(11.4, float("nan"), float("nan")),
    18: Seen(14.5, 4, 29),
}
