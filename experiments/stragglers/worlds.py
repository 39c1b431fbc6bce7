"""Kinds of slowness: the measured one, tails of several weights, and slowness that is no tail at all.

All but the first have steps of about 1.6 s, which is the mean of the measured one; what differs is how they differ.
"""

from __future__ import annotations

from typing import NamedTuple


class World(NamedTuple):
    """A kind of slowness, as a latency text of the library."""

    name: str
    latency: str
    #: Slow periods come by the clock: how many rounds fall into one depends on how long rounds are, so that what a run
    #: with another quorum would see cannot be read off the arrivals of full sync.
    by_the_clock: bool = False


WORLDS = {
    world.name: world
    for world in (
        World("measured (chen2016)", "chen2016"),
        World("no tail", "constant:1.6"),
        World("exponential, mild", "shifted-exp:1.45,0.15"),
        World("exponential, strong", "shifted-exp:0.8,0.8"),
        World("lognormal, s = 0.2", "lognormal:1.57,0.2"),
        World("lognormal, s = 0.5", "lognormal:1.41,0.5"),
        World("Pareto, α = 4", "pareto:1.2,4"),
        World("Pareto, α = 2.5", "pareto:0.96,2.5"),
        World("rare pauses, 1 % × 4", "lognormal:1.55,0.05*pauses:0.01,4"),
        World("one always slow, × 2", "lognormal:1.6,0.05*slow:0=2"),
        World("all slow together", "lognormal:1.6,0.05*spells:300,30,4", by_the_clock=True),
        World("a few slow for a while", "lognormal:1.6,0.05*spells:300,60,4,0.03", by_the_clock=True),
    )
}
MEASURED = "measured (chen2016)"
