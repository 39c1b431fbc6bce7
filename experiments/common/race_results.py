"""What a race came to: the tables and figures, from its trials alone."""

from __future__ import annotations

from pathlib import Path

from experiments.common.curves import Point
from experiments.common.race import Race, Trial
from experiments.common.race_figures import draw_curves, draw_ends, draw_tuning
from experiments.common.race_tables import (
    controls_table,
    halved_table,
    method_table,
    shorter_table,
    tuning_table,
    unit_of,
)
from experiments.common.trials import Found


def write_race(race: Race, found: Found[Trial, Point], folder: Path, digits: int = 3) -> list[Path]:
    """summary.md, curves.png, tuning.png and, if there are any, ends.png; `digits` of the measure are shown."""
    files = [folder / name for name in ("summary.md", "curves.png", "tuning.png")]
    parts = [
        f"Latency {latency}; every method with its tuned rate\n\n{method_table(race, found, latency, digits)}"
        for latency in race.latencies
    ]
    if race.shares:
        parts.append(
            f"To the end of a shorter time, latency {race.latencies[0]}\n\n{shorter_table(race, found, digits)}"
        )
    if race.halved:
        parts.append(f"At half the rate, latency {race.latencies[0]}\n\n{halved_table(race, found, digits)}")
    if race.controls:
        parts.append(f"Beside the race, at rates that it tuned\n\n{controls_table(race, found, digits)}")
    parts.append(
        f"Tuning: {race.measure} of one seed after {unit_of(race).of(race.tuning_seconds)}, on {race.tuned_with}\n\n"
        f"{tuning_table(race, found)}"
    )
    files[0].write_text("\n".join(parts))
    draw_curves(race, found, files[1])
    draw_tuning(race, found, files[2])
    if race.shares:
        files.append(folder / "ends.png")
        draw_ends(race, found, files[-1], digits)
    return files
