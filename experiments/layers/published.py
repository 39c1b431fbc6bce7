"""What Chen et al. saw in a real asynchronous run.

Source: J. Chen, X. Pan, R. Monga, S. Bengio, R. Jozefowicz, Revisiting Distributed Synchronous SGD (arXiv 1604.00981),
on the staleness of asynchronous training: 40 workers, an Inception net of 18 layers, parameters on servers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from experiments.published import CHEN

_SEEN = CHEN["layer_staleness"]
WORKERS: int = _SEEN["workers"]
LAYERS: int = _SEEN["layers"]


class Seen(NamedTuple):
    """Staleness of a layer in updates; where the paper gives no range it is NaN."""

    mean: float
    lowest: float
    highest: float


#: By layer, from 1 at the bottom (the pictures) to 18 at the top (the loss).
STALENESS = {
    int(layer): Seen(mean, *_SEEN["range"].get(layer, (math.nan, math.nan))) for layer, mean in _SEEN["mean"].items()
}
