"""The tables of README.md: the local engine beside DDP, and backups beside async."""

from __future__ import annotations

from benchmarks.tables import local

from experiments.common.race import Race
from experiments.common.race_tables import seconds_to
from experiments.common.spread import Spread, markdown, spread_of
from experiments.common.to_target import finals
from experiments.inception import results as inception
from experiments.inception.settings import ASYNC, SYNC
from experiments.language.settings import FULL as LANGUAGE
from experiments.language.settings import FULL_SYNC, shared_rate
from experiments.pages.chen import PIXELCNN_LATENCY, pixelcnn_end, slow_end
from experiments.pages.found import found
from experiments.pixelcnn.settings import FULL as PIXELCNN
from experiments.pixelcnn.settings import FULL_16, ONE

PAPERS_STRAGGLERS = LANGUAGE.latencies[0]


def beside_ddp() -> str:
    rows = []
    for size in ("0.1M", "5M", "25M"):
        ours = local("a", size, "a", 8)["ours"]
        ddp, quorum = local("stragglers", size, "b", 8).get("ddp"), local("stragglers", size, "b", 8, 6).get("ours")
        tail = "not measured: two cores cannot keep up"
        if ddp is not None and quorum is not None:
            tail = f"{quorum['updates_per_s']:.1f} / {ddp['updates_per_s']:.1f}"
        rows.append([size, f"{ours['over_ddp']:.1f}×", f"{ours['cpu_over_ddp']:.2f}×", tail])
    head = ["parameters", "updates/s without stragglers, ours / DDP", "CPU time an update"]
    return markdown([*head, "stragglers (50 ms + Exp(25 ms)): 6+2 / DDP on 8, updates/s"], rows)


def times_as_soon(race: Race, experiment: str, sooner: str, later: str) -> float:
    """Of two methods under the first latency: seconds to what both have in their worst seed, later over sooner."""
    latency = race.latencies[0]
    both = [race.curves(name, found(experiment), latency) for name in (sooner, later)]
    worst, best = (min, max) if race.rising else (max, min)
    target = worst(best(point.measure for point in points) for curves in both for points in curves)
    seconds = [seconds_to(race, curves, target) for curves in both]
    assert all(len(one) == len(curves) for one, curves in zip(seconds, both, strict=True))
    return (sum(seconds[1]) / len(seconds[1])) / (sum(seconds[0]) / len(seconds[0]))


def language_end(name: str) -> Spread:
    """Nats at the end, with the paper's stragglers."""
    curves = LANGUAGE.curves(name, found("language"), PAPERS_STRAGGLERS)
    return spread_of([LANGUAGE.final(points) for points in curves])


def language_at_one_rate(backups: int) -> Spread:
    """The same with full sync's rate, over five seeds."""
    curves = LANGUAGE.controlled(shared_rate(backups), found("language"), PAPERS_STRAGGLERS)
    return spread_of([LANGUAGE.final(points) for points in curves])


def exploded(name: str) -> int:
    """Long PixelCNN trainings with one step that end a tenth of a bit or more above what they once had."""
    curves = PIXELCNN.curves(name, found("pixelcnn"), PIXELCNN_LATENCY)
    return sum(points[-1].measure > min(point.measure for point in points) + 0.1 for points in curves)


def _bits(end: Spread | None) -> str:
    assert end is not None
    return end.text(3)


def adaptive_in_the_contest() -> dict[tuple[int, str], float]:
    """By machines and latency: how many times as soon adaptive backups are there as the better of two fixed numbers."""
    races = found("contest")
    made = {}
    for machines, latency in dict.fromkeys((trial.machines, trial.latency) for trial in races):
        seconds = {
            trial.method: spread_of([row.seconds for row in finals(rows)]).mean
            for trial, rows in races.items()
            if (trial.machines, trial.latency) == (machines, latency)
        }
        made[machines, latency] = min(seconds["backups 6 %"], seconds["backups 25 %"]) / seconds["adaptive backups"]
    return made


def beside_async() -> str:
    ends = inception.finals(found("inception"))
    rows: list[list[str]] = []
    for (n, b), workers in zip(SYNC, ASYNC, strict=True):
        sync, stale = ends[f"sync {n}+{b}"], ends[f"async {workers}"]
        shown = [f"{inception.accuracy(curves).text(1, 100)} %" for curves in (sync, stale)]
        what = f"{workers} machines" if rows else f"Inception, accuracy: {workers} machines"
        rows.append([what, f"**{shown[0]}**", shown[1], "", _soon(inception.times_as_soon(sync, stale))])
    rows.append(
        [
            "character transformer, test loss in nats: 16 machines",
            f"**{language_end('14+2').text(3)}**",
            language_end("async").text(3),
            f"full sync: {language_end(FULL_SYNC).text(3)}; backups at its rate: {language_at_one_rate(2).text(3)}",
            _soon(times_as_soon(LANGUAGE, "language", "14+2", "async")),
        ]
    )
    rows.append(
        [
            "PixelCNN, test NLL in bits, slow decay: 16 machines",
            f"**{_bits(slow_end('15+1'))}**",
            "not run",
            f"full sync: {_bits(slow_end(FULL_16))}; one machine: {_bits(slow_end(ONE))}",
            "",
        ]
    )
    rows.append(
        [
            "PixelCNN, one step, not clipped: 16 machines",
            f"{_bits(pixelcnn_end('15+1'))}: {exploded('15+1')} of 3 seeds explode",
            _bits(pixelcnn_end("async 16")),
            f"one machine: {_bits(pixelcnn_end(ONE))}; at half the tuned rate {_bits(pixelcnn_end(ONE, times=0.5))}",
            _soon(times_as_soon(PIXELCNN, "pixelcnn", "15+1", "async 16")),
        ]
    )
    return markdown(["", "with backups", "async", "without either", "backups are at what both reach"], rows)


def _soon(ratio: float) -> str:
    return f"{ratio:.1f} times as soon"
