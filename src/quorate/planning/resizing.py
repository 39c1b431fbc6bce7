"""The same world with more machines, with fewer, without some, or on another network."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quorate.errors import BadInput
from quorate.network import Network
from quorate.planning.fits import draws, fit_laws
from quorate.planning.world import Floats, World


def resize(world: World, machines: int, seed: int = 0) -> World:
    """So many machines. More: others besides, from a fitted law; fewer: some of them, drawn anew each round."""
    random = np.random.default_rng((seed, machines))  # never the stream that made the times that are there
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
    larger = replace(
        world,
        seconds=np.concatenate([world.seconds, extra], axis=1),
        transfer_s=None if world.transfer_s is None else _with_usual(world.transfer_s, more),
        workers=(*world.workers, *range(max(world.workers) + 1, max(world.workers) + 1 + more)),
    )
    return larger.noted(f"{world.machines} machines were measured; {more} more have {how}: an extrapolation")


def _fewer(world: World, machines: int, random: np.random.Generator) -> World:
    """Some of the workers. Those that hardly ever finished only where there are not enough others."""
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
        slowest_part=None,  # the numbers are no longer those of the workers
    )
    return smaller.noted(
        f"{machines} of {world.machines} measured workers, others in each round: an average over which to take"
    )


def remove(world: World, workers: list[int]) -> World:
    """Without some workers, named by their numbers."""
    for worker in workers:
        if worker not in world.workers:
            raise BadInput(f"without={worker}: there is no such worker; there are {_range(world.workers)}")
    rest = [column for column, worker in enumerate(world.workers) if worker not in workers]
    if len(rest) < 1:
        raise BadInput(f"without={'+'.join(map(str, workers))} leaves no worker; name fewer")
    return world.with_columns(rest)


def on_network(world: World, network: Network) -> World:
    """Times as they would be over these links; what was measured of communication is taken off first.

    The arithmetic is the simulator's: versions leave a server one after the other, gradients queue at its link.
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


def _with_usual(transfer_s: Floats, more: int) -> Floats:
    usual = np.median(transfer_s, axis=1, keepdims=True)
    return np.concatenate([transfer_s, np.repeat(usual, more, axis=1)], axis=1)


def _levels(world: World) -> Floats:
    """(rounds, 1): how slow each stretch of rounds is beside the whole."""
    whole = np.median(world.seconds)
    levels = np.empty((world.rounds, 1))
    for regime in world.regimes:
        levels[regime] = np.median(world.seconds[regime]) / whole
    return levels


def _range(workers: tuple[int, ...]) -> str:
    if workers == tuple(range(workers[0], workers[0] + len(workers))):
        return f"{workers[0]} to {workers[-1]}"
    return ", ".join(map(str, workers))
