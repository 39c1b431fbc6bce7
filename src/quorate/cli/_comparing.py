"""Runs of one comparison, one after the other, and the folder they are kept in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quorate.cli._progress import Reporter
from quorate.cli._running import Plan
from quorate.conditions import KnownMeasure
from quorate.errors import BadInput, Diverged, LearnerLost, QuorumLost
from quorate.policies import Policy
from quorate.reporting.comparison import Outcome, Row, csv_text, summary_of
from quorate.trace import TRACE_FILE, Recorder

if TYPE_CHECKING:
    from quorate.conditions import Until

FIGURE_FILE, TABLE_FILE, SUMMARY_FILE = "figure.png", "table.csv", "summary.json"
RUN_FILES = (TRACE_FILE, "summary.json", "parameters.safetensors")
CHECKPOINTS, CHECKPOINT_FILES = "checkpoints", ("tensors.safetensors", "state.json", "manifest.json")


@dataclass(frozen=True)
class Contender:
    """One run that is to be made."""

    name: str  # its key, and the name of its folder
    label: str
    policy: Policy
    task: str | None = None  # where it is not the plan's


class ComparisonFolder:
    """A folder with one sub-folder a run, a table, a figure and a summary. Only these files are its own."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.path = path
        self._names = names
        self._made = not path.exists()

    def check_free(self, remedy: str) -> None:
        """Refuse a folder in which something of an earlier comparison would be overwritten."""
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"out is {str(self.path)!r}, which is a file; name a new folder")
        for file in self._files():
            if file.exists():
                there = file.relative_to(self.path)
                raise BadInput(f"the folder {str(self.path)!r} already holds a comparison ({there}); {remedy}")

    def clear(self) -> None:
        """Remove what a comparison wrote here, and nothing else; links are not followed."""
        for file in self._files():
            if not file.parent.is_symlink() and (file.is_file() or file.is_symlink()):
                file.unlink()
        for name in self._names:
            _clear_checkpoints(self.path / name / CHECKPOINTS)
            _remove_if_empty(self.path / name)

    def discard(self) -> None:
        """Bad input came to light only on the way: leave no trace of the runs before it."""
        self.clear()
        if self._made:
            _remove_if_empty(self.path)

    def run_folder(self, name: str) -> Path:
        return self.path / name

    def write(self, outcomes: Sequence[Outcome], rows: Sequence[Row], target: Until | None) -> None:
        """The table and the summary; the figure is drawn by whoever wants one."""
        import json

        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / TABLE_FILE).write_text(csv_text(rows), encoding="utf-8")
        text = json.dumps(summary_of(outcomes, target), indent=2)
        (self.path / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")

    def _files(self) -> list[Path]:
        runs = [self.path / name / file for name in self._names for file in RUN_FILES]
        return [*runs, *(self.path / file for file in (FIGURE_FILE, TABLE_FILE, SUMMARY_FILE))]


def _clear_checkpoints(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not folder.parent.is_symlink():
        for checkpoint in folder.iterdir():
            if checkpoint.is_dir() and not checkpoint.is_symlink():
                for name in CHECKPOINT_FILES:
                    (checkpoint / name).unlink(missing_ok=True)
                _remove_if_empty(checkpoint)
    _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def run_all(
    plan: Plan,
    contenders: Sequence[Contender],
    target: Until | None,
    reporter: Reporter,
    folder: ComparisonFolder | None,
) -> list[Outcome]:
    """Run one after the other. One that breaks off (diverged, quorum lost …) is a result too, and the others go on."""
    try:
        return [_run_one(plan, contender, target, reporter, folder) for contender in contenders]
    except BadInput:
        if folder is not None:
            folder.discard()
        raise


def _run_one(
    plan: Plan, contender: Contender, target: Until | None, reporter: Reporter, folder: ComparisonFolder | None
) -> Outcome:
    from quorate.metrics import Metrics
    from quorate.reporting.rounds import WholeRounds

    metrics, arrivals = Metrics(), WholeRounds()
    recorders: list[Recorder] = [metrics]
    policy = contender.policy
    if policy.name == "full-sync":
        recorders.append(arrivals)
    if target is not None:
        recorders.append(KnownMeasure(target, ends_run=False))
    broke_off = None
    try:
        plan.run(
            policy,
            contender.label,
            reporter,
            task=contender.task,
            out=None if folder is None else folder.run_folder(contender.name),
            recorders=tuple(recorders),
        )
    except (Diverged, LearnerLost, QuorumLost) as error:
        broke_off = str(error)
        metrics.ended(metrics.seconds, metrics.updates, broke_off, None)
    return Outcome(
        name=contender.name,
        label=contender.label,
        metrics=metrics,
        broke_off=broke_off,
        kth_arrivals=arrivals.times,
    )
