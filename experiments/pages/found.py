"""The committed results of the experiments, each read once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from experiments.common import curves, race, to_target
from experiments.common.trials import Found, Table
from experiments.contest import settings as contest_settings
from experiments.contest import shared as contest_shared
from experiments.delay import held_out, rows
from experiments.inception import settings as inception_settings
from experiments.inception import timing as inception_timing
from experiments.layers import study
from experiments.rate import racing
from experiments.rate import settings as rate_settings
from experiments.staleness import settings as staleness_settings
from experiments.stragglers import simulated

EXPERIMENTS = Path(__file__).parent.parent
_TABLES: dict[str, tuple[str, Any, Any]] = {
    "contest": ("races.csv", contest_settings.Trial, to_target.Finish),
    "contest/shared": ("shared.csv", contest_shared.Shared, to_target.Finish),
    "delay": ("curves.csv", rows.Setting, rows.Row),
    "delay/held-out": ("held-out.csv", held_out.Trial, rows.Row),
    "inception": ("curves.csv", inception_settings.Trial, curves.Point),
    "inception/rounds": ("rounds.csv", inception_timing.Split, inception_timing.Seconds),
    "language": ("curves.csv", race.Trial, curves.Point),
    "layers": ("depth.csv", study.Depth, study.Staleness),
    "pixelcnn": ("curves.csv", race.Trial, curves.Point),
    "rate": ("races.csv", rate_settings.Trial, racing.Run),
    "staleness": ("curves.csv", staleness_settings.Trial, curves.Point),
    "stragglers": ("simulated.csv", simulated.Rounds, simulated.Arrival),
}


@cache
def found(experiment: str) -> Found[Any, Any]:
    """All trials of an experiment with their rows; an experiment with two tables has "experiment/table", too."""
    name, trial, row = _TABLES[experiment]
    return Table(EXPERIMENTS / experiment.split("/")[0] / "results" / name, trial, row).read()
