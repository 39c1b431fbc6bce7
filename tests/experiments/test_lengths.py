"""The study of lengths: its pieces, and from end to end in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experiments.common.command import main
from experiments.language.training import MADE_UP
from experiments.lengths.__main__ import EXPERIMENT, _table
from experiments.lengths.settings import (
    FULL_SYNC,
    GIVEN_BACK,
    GONE,
    LENGTHS,
    QUORUMS,
    WORKERS,
    OfLength,
    Setting,
    Training,
    wanted,
)
from experiments.lengths.tables import losses, paces, shares
from experiments.lengths.training import Items


def test_every_training_uses_equally_many_gradients() -> None:
    trials = list(wanted(Setting()))
    assert len(set(trials)) == len(trials)
    assert {trial.updates * QUORUMS[trial.how] for trial in trials} == {Setting.items * Setting.epochs}
    assert max(QUORUMS.values()) == WORKERS


def test_items_are_equally_long_sequences_and_the_test_is_other_text() -> None:
    items = Items(MADE_UP, 24, seed=1)
    assert [items[i].shape[1] - 1 for i in range(8)] == [*LENGTHS, *LENGTHS]
    assert not torch.equal(items[0], Items(MADE_UP, 24, seed=2)[0])
    tested = list(items.tested(32))
    again = list(Items(MADE_UP, 24, seed=2).tested(32))
    assert all(torch.equal(one, other) for one, other in zip(tested, again, strict=True))


def test_shares_are_over_those_of_the_data() -> None:
    def rows(used: tuple[int, ...], seconds: float) -> list[OfLength]:
        return [OfLength(length, n, n, 2.0, seconds) for length, n in zip(LENGTHS, used, strict=True)]

    found = {
        Training(FULL_SYNC, 24, 1, 8, 1): rows((6, 6, 6, 6), 2.0),
        Training(GONE, 24, 1, 8, 1): rows((9, 9, 5, 1), 1.0),
    }
    assert [shares(found, GONE, length).mean for length in LENGTHS] == pytest.approx([1.5, 1.5, 5 / 6, 1 / 6])
    assert paces(found, GONE).mean == pytest.approx(2.0)
    assert losses(found, GONE, 16).mean == 2.0


@pytest.mark.experiments
def test_quick_runs_to_the_figures(tmp_path: Path) -> None:
    assert main(EXPERIMENT, ["run", "--quick", "--out", str(tmp_path)]) == 0
    for name in ("lengths.png", "summary.md"):
        assert (tmp_path / name).stat().st_size > 100
    for trial, rows in _table(tmp_path).read().items():
        used = [row.used for row in rows]
        if trial.how == GONE:
            assert sum(used) >= trial.updates * QUORUMS[GONE]
        else:
            assert used == [trial.items // len(LENGTHS)] * len(LENGTHS)  # each item exactly once an epoch


def test_the_committed_trainings_with_a_ledger_used_every_item_once_an_epoch() -> None:
    for trial, rows in _table(EXPERIMENT.results).read().items():
        if trial.how in (FULL_SYNC, GIVEN_BACK):
            assert [row.used for row in rows] == [trial.items * trial.epochs // len(LENGTHS)] * len(LENGTHS)


@pytest.mark.experiments
def test_the_committed_summary_can_be_made_again(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_bytes((EXPERIMENT.results / "lengths.csv").read_bytes())
    assert main(EXPERIMENT, ["figures", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "summary.md").read_text() == (EXPERIMENT.results / "summary.md").read_text()
