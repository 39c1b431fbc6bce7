"""What-if scenarios: the same world with more or fewer machines, without some workers, or on another network."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from quorate.errors import BadInput, check_at_least
from quorate.network import Network, parse_network
from quorate.planning.fits import draws, fit_laws
from quorate.planning.world import Floats, World


def resize(world: World, machines: int, seed: int = 0) -> World:
    """The world with `machines` workers: additional ones from a fitted law, or a random subset in each round."""
    random = np.random.default_rng((seed, machines))  # never the stream that drew the existing times
    if machines == world.machines:
        return world
    if machines < world.machines:
        return _fewer(world, machines, random)
    more = machines - world.machines
    levels = _levels(world)
    fits = fit_laws(world.seconds / levels)
    if fits:
        extra = draws(fits[0].law, (world.rounds, more), random) * levels
        how = f"times of a fitted law, {fits[0].text} (distance {fits[0].distance:.3f} from what was measured)"
    else:
        extra = np.repeat(world.seconds.mean(axis=1, keepdims=True), more, axis=1)
        how = "the time that all others take"
    transfer_s = world.transfer_s
    if transfer_s is not None:
        usual = np.median(transfer_s, axis=1, keepdims=True)
        transfer_s = np.concatenate([transfer_s, np.repeat(usual, more, axis=1)], axis=1)
    larger = replace(
        world,
        seconds=np.concatenate([world.seconds, extra], axis=1),
        transfer_s=transfer_s,
        workers=(*world.workers, *range(max(world.workers) + 1, max(world.workers) + 1 + more)),
    )
    return larger.noted(f"{world.machines} machines were measured; {more} more have {how}: an extrapolation")


def _fewer(world: World, machines: int, random: np.random.Generator) -> World:
    """A subset of the workers; those that hardly ever finished are used only if the others are too few."""
    unseen = [column for column, worker in enumerate(world.workers) if worker in world.unseen]
    seen = [column for column in range(world.machines) if column not in unseen]
    if unseen and machines >= len(seen):
        fewest = world.with_columns(sorted(seen + unseen[: machines - len(seen)]))
        return fewest.noted(f"{machines} of the {world.machines} measured workers: those that finished most often")
    world = world.with_columns(seen)
    order = np.argsort(random.random(world.seconds.shape), axis=1)[:, :machines]
    smaller = replace(
        world,
        seconds=np.take_along_axis(world.seconds, order, axis=1),
        transfer_s=None if world.transfer_s is None else np.take_along_axis(world.transfer_s, order, axis=1),
        workers=tuple(range(machines)),
        unseen=frozenset(),
        slowest_part=None,  # worker numbers no longer identify workers
    )
    return smaller.noted(
        f"{machines} of {world.machines} measured workers, others in each round: an average over which to take"
    )


def remove(world: World, workers: tuple[int, ...]) -> World:
    """The world without the workers of these numbers."""
    for worker in workers:
        if worker not in world.workers:
            raise BadInput(f"without={worker}: there is no such worker; there are {_range(world.workers)}")
    rest = [column for column, worker in enumerate(world.workers) if worker not in workers]
    if not rest:
        raise BadInput(f"without={'+'.join(map(str, workers))} leaves no worker; name fewer")
    return world.with_columns(rest)


def on_network(world: World, network: Network) -> World:
    """Times over other links: measured communication is subtracted, simulated communication is added.

    The arithmetic is the simulator's: a server sends versions one after the other, and gradients queue at its link.
    """
    if not world.model_bytes:
        raise BadInput("a bandwidth is given, but not what goes over it; give the size of the model (--model-bytes)")
    size = world.model_bytes
    compute = world.seconds if world.transfer_s is None else np.maximum(world.seconds - world.transfer_s, 1e-9)
    own, server = network.worker_s(size), network.server_s(size)
    out = np.maximum(server * np.arange(1, world.machines + 1), own) + network.latency_s
    ready = compute + out
    order = np.argsort(ready, axis=1)
    sorted_ready = np.take_along_axis(ready, order, axis=1)
    places = np.arange(world.machines)
    served = np.maximum.accumulate(sorted_ready - server * places, axis=1) + server * (places + 1)
    arrives = np.empty_like(ready)
    np.put_along_axis(arrives, order, np.maximum(served, sorted_ready + own) + network.latency_s, axis=1)
    return replace(world, seconds=arrives, transfer_s=arrives - compute)


def _levels(world: World) -> Floats:
    """(rounds, 1): median time of the stretch of each round, relative to the median of all."""
    whole = np.median(world.seconds)
    levels = np.empty((world.rounds, 1))
    for regime in world.regimes:
        levels[regime] = np.median(world.seconds[regime]) / whole
    return levels


def _range(workers: tuple[int, ...]) -> str:
    if workers == tuple(range(workers[0], workers[0] + len(workers))):
        return f"{workers[0]} to {workers[-1]}"
    return ", ".join(map(str, workers))


_FORMS = (
    '"machines=200", "without=3" (several: without=3+5) or "bandwidth=1Gbps" (also server=10Gbps, shards=8, '
    "latency=0.5ms)"
)
MOST_MACHINES = 10_000  # a plan takes a minute or two
_LINKS = ("bandwidth", "server", "shards", "latency")


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The changes of one scenario."""

    text: str
    machines: int | None = None
    without: tuple[int, ...] = ()
    network: Network | None = None


def parse_what_if(text: str) -> WhatIf:
    """Read one scenario; commas join several changes."""
    machines: int | None = None
    without: tuple[int, ...] = ()
    links: list[str] = []
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in ("machines", "without", *_LINKS):
            raise BadInput(f"what-if {text!r}: {part.strip()!r} is not understood; write e.g. {_FORMS}")
        if name in _LINKS:
            links.append(f"{name}={value}")
        elif re.fullmatch(r"\d+(\+\d+)*", value) is None or (name == "machines" and "+" in value):
            raise BadInput(f"what-if {text!r}: {value!r} is no number from 0 up; write e.g. {_FORMS}")
        elif name == "machines":
            machines = check_at_least(f"what-if {text!r}: machines", int(value[:30]), 1, MOST_MACHINES)
        else:
            without = tuple(int(number) for number in value.split("+"))
    return WhatIf(
        text=text.strip(), machines=machines, without=without, network=parse_network(",".join(links)) if links else None
    )
