"""The command line of an experiment that is a race: run what is missing, or draw what is there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from experiments.common.command import Experiment, Options
from experiments.common.curves import Point
from experiments.common.race import Race, Trial
from experiments.common.studies import Study, read_all, run_studies
from experiments.common.trials import Found, Table
from quorate.errors import BadInput


class RaceExperiment(Experiment):
    """A race in full and in quick; what is trained is the subclass's. digits: of the measure, in tables."""

    full: ClassVar[Race]
    quick: ClassVar[Race]
    digits: ClassVar[int] = 3

    @abstractmethod
    def training(self, options: Options) -> Callable[[Trial], list[Point]]:
        """What runs one trial, in this process or in another; says here what data is missing."""

    def run(self, options: Options) -> bool:
        race = self.quick if options.quick else self.full
        return run_studies(options, Study(_table(options.out), race.wanted, self.training(options), _tell))

    def figures(self, folder: Path) -> list[Path]:
        from experiments.common.race_results import write_race

        (found,) = read_all(self.name, folder, _table(folder))
        race = self._race_of(found, folder)
        return [*write_race(race, found, folder, self.digits), *self.more(race, found, folder)]

    def more(self, race: Race, found: Found[Trial, Point], folder: Path) -> list[Path]:
        """Figures and tables of the experiment's own."""
        return []

    def _race_of(self, found: Found[Trial, Point], folder: Path) -> Race:
        """The one that these trials are of: quick ones have other lengths."""
        for race in (self.full, self.quick):
            if any(trial.seconds in (race.seconds, race.tuning_seconds) for trial in found):
                return race
        raise BadInput(f"there are no trials of {self.name} in {str(folder)!r}; run them first")


def _table(folder: Path) -> Table[Trial, Point]:
    return Table(folder / "curves.csv", Trial, Point)


def _tell(trial: Trial, points: Sequence[Point]) -> None:
    end = "diverged" if points[-1].diverged else f"{points[-1].measure:.4g}"
    print(f"{trial.method}, {trial.latency}, rate {trial.lr:g}, seed {trial.seed}: {end}", flush=True)
