"""Latency models: how long one ticket takes on one worker, as a pure function of seed, worker, step, row and time.

| text | the time of a ticket |
|---|---|
| ``constant:SECONDS`` | always the same |
| ``shifted-exp:SHIFT_S,MEAN_S`` | a fixed part plus an exponential part of that mean |
| ``lognormal:MEDIAN_S,SIGMA`` | its logarithm is normal with standard deviation sigma |
| ``pareto:SCALE_S,ALPHA`` | a power tail: P(time > t) = (scale/t)^alpha |
| ``quantiles:SECONDS@LEVEL,…`` | measured quantiles from level 0 to 1, straight lines between |
| ``pause:BASE_S,PROBABILITY,FACTOR`` | always the same, but with that probability FACTOR times as long |
| ``trace:PATH`` | as in a recorded run |
| ``chen2016`` | the 100 workers of Chen et al. 2016, every k-th arrival as measured |

Modifiers follow a model after ``*`` and apply from left to right, as in
``shifted-exp:0.05,0.025*slow:3=4*pauses:0.05,10``:

| text | effect |
|---|---|
| ``*slow:WORKER=FACTOR,…`` | these workers always take FACTOR times as long |
| ``*pauses:PROBABILITY,FACTOR`` | each ticket, with that probability, takes FACTOR times as long |
| ``*spells:EVERY_S,LENGTH_S,FACTOR[,SHARE]`` | one slow spell per time window, for all workers or a share of them |

``MODEL->SECONDS->MODEL`` switches from one (modified) model to another at that time of the run, once or several times.
"""

from quorate.latency.base import Draw, Independent, Latency
from quorate.latency.chen2016 import Chen2016, chen2016_figures
from quorate.latency.laws import Constant, Lognormal, Pareto, Pause, Quantiles, ShiftedExponential
from quorate.latency.modifiers import Changing, Modifier, Pauses, Slow, Spells
from quorate.latency.order_statistics import order_statistic_mean
from quorate.latency.parsing import parse_latency
from quorate.latency.recorded import Recorded

__all__ = [
    "Changing",
    "Chen2016",
    "Constant",
    "Draw",
    "Independent",
    "Latency",
    "Lognormal",
    "Modifier",
    "Pareto",
    "Pause",
    "Pauses",
    "Quantiles",
    "Recorded",
    "ShiftedExponential",
    "Slow",
    "Spells",
    "chen2016_figures",
    "order_statistic_mean",
    "parse_latency",
]
