"""Trials survive stops, kills and errors: what is in the table is whole, and a second call runs only the rest."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from experiments.common.trials import Found, Table, TrialsFailed, run_trials
from experiments.common.tuning import tuned

from quorate.errors import BadInput


@dataclass(frozen=True)
class Trial:
    name: str
    rate: float
    seed: int = 0
    is_slow: bool = False


class Row(NamedTuple):
    step: int
    measure: float
    note: str = ""


def trials(count: int) -> list[Trial]:
    return [Trial("a, and b", 0.1 / 3 * (number + 1), number, number % 2 == 1) for number in range(count)]


def rows_of(trial: Trial) -> list[Row]:
    return [Row(step, 0.5 * step + trial.seed) for step in range(3)]


def table(folder: Path) -> Table[Trial, Row]:
    return Table(folder / "deep" / "table.csv", Trial, Row)


class Training:
    """Gives rows at once, and remembers what it was asked for."""

    def __init__(self, then: Callable[[Trial], None] = lambda trial: None) -> None:
        self.asked: list[Trial] = []
        self._then = then

    def __call__(self, trial: Trial) -> list[Row]:
        self.asked.append(trial)
        self._then(trial)
        return rows_of(trial)


# ---------------------------------------------------------------- the table


def test_what_was_written_is_read_again_with_every_bit_of_a_trial(tmp_path: Path) -> None:
    odd = [Trial('quoted "x"\nand two lines', 0.1 / 3, 7, True), Trial("", 1e-300, -1, False)]
    written = [Row(1, math.nan, "a,b"), Row(2, 1 / 3, "\u2028"), Row(3, math.inf)]
    here = table(tmp_path)
    kept = [here.append(trial, written) for trial in odd]
    found = table(tmp_path).read()
    assert list(found) == odd
    assert [row[1:] for row in found[odd[0]][1:]] == [(0.333333, "\u2028"), (math.inf, "")]
    assert math.isnan(found[odd[0]][0].measure)
    assert repr(list(found.values())) == repr(kept)  # NaN is not equal to itself


def test_no_file_and_an_empty_one_hold_nothing(tmp_path: Path) -> None:
    here = table(tmp_path)
    assert here.read() == {}
    here.file.parent.mkdir()
    here.file.write_text("")
    assert here.read() == {}
    here.append(trials(1)[0], [Row(1, 2.0)])
    assert here.read() == {trials(1)[0]: [Row(1, 2.0)]}


def test_a_kill_leaves_the_table_as_it_was_before_or_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, (first, second) = table(tmp_path), trials(2)
    here.append(first, rows_of(first))

    def die(*rest: object, **options: object) -> None:
        raise KeyboardInterrupt

    for step in ("write_text", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(Path, step, die)
            with pytest.raises(KeyboardInterrupt):
                here.append(second, rows_of(second))
        assert here.read() == {first: rows_of(first)}
    here.append(second, rows_of(second))
    assert here.read() == {first: rows_of(first), second: rows_of(second)}
    assert [file.name for file in here.file.parent.iterdir()] == ["table.csv"]


def test_of_a_copy_that_was_cut_short_no_trial_counts_that_may_be_incomplete(tmp_path: Path) -> None:
    here, (first, second) = table(tmp_path), [Trial("first", 0.5), Trial("second", 0.5)]
    here.append(first, rows_of(first))
    begun = here.file.stat().st_size
    here.append(second, rows_of(second))
    whole = here.file.read_bytes()
    line_ends = {place + 1 for place in range(begun, len(whole)) if whole[place : place + 1] == b"\n"}
    for cut in set(range(begun + 1, len(whole))) - line_ends:
        here.file.write_bytes(whole[:cut])
        assert here.read() == {first: rows_of(first)}, cut
        here.append(second, rows_of(second))
        assert here.file.read_bytes() == whole, cut


def test_a_torn_first_line_of_another_trial_leaves_the_one_before(tmp_path: Path) -> None:
    here, (first, second) = table(tmp_path), [Trial("same", 0.5, 1), Trial("same", 0.5, 2)]
    here.append(first, rows_of(first))
    with here.file.open("a") as opened:
        opened.write("same,0.5,2,Fal")
    assert here.read() == {first: rows_of(first)}
    here.append(second, rows_of(second))
    assert here.read() == {first: rows_of(first), second: rows_of(second)}


def test_other_columns_and_broken_lines_are_refused(tmp_path: Path) -> None:
    here = table(tmp_path)
    here.file.parent.mkdir()
    here.file.write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="has other columns than this experiment's table; give another folder"):
        here.read()
    here.file.write_text("name,rate,seed,is_slow,step,measure,note\nx,1,2,True,3,4,\nx,1,no number,True,3,4,\n")
    with pytest.raises(BadInput, match=r"cannot be read in line 3 \(.*'no number'\); mend or remove that line"):
        here.read()
    here.file.write_text("name,rate,seed,is_slow,step,measure,note\nx,1,2,True,3\n")
    with pytest.raises(BadInput, match="cannot be read in line 2"):
        here.read()


# ---------------------------------------------------------------- running


def test_a_second_call_runs_only_what_is_missing(tmp_path: Path) -> None:
    first, second = Training(), Training()
    assert run_trials(table(tmp_path), lambda found: trials(3), first)
    assert run_trials(table(tmp_path), lambda found: trials(5), second)
    assert (first.asked, second.asked) == (trials(3), trials(5)[3:])
    assert list(table(tmp_path).read()) == trials(5)


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    def stop_at_third(trial: Trial) -> None:
        if trial.seed == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trials(table(tmp_path), lambda found: trials(4), Training(stop_at_third))
    assert list(table(tmp_path).read()) == trials(2)
    rest = Training()
    assert run_trials(table(tmp_path), lambda found: trials(4), rest)
    assert rest.asked == trials(4)[2:]


def wanted_after_tuning(found: Found[Trial, Row]) -> list[Trial]:
    """The nearest to 0.02 of some rates, and with the chosen one two more seeds."""

    def score(trial: Trial) -> float | None:
        return -abs(math.log(trial.rate / 0.02)) if trial in found else None

    tuning, best = tuned([0.1 / 3, 0.2 / 3], lambda rate: Trial("x", rate), score, most=4)
    return tuning if best is None else [*tuning, *(Trial("x", best.rate, seed) for seed in (1, 2))]


@pytest.mark.parametrize("stop_after", range(6))
def test_what_follows_from_results_is_wanted_then_wherever_it_was_stopped(tmp_path: Path, stop_after: int) -> None:
    everything = Training()
    assert run_trials(table(tmp_path / "whole"), wanted_after_tuning, everything)
    assert len(everything.asked) == 6
    assert {trial.rate for trial in everything.asked if trial.seed} == {0.1 / 3 / 2}

    here, rest = table(tmp_path / "parts"), Training()
    for trial in everything.asked[:stop_after]:
        here.append(trial, rows_of(trial))
    assert run_trials(here, wanted_after_tuning, rest)
    assert rest.asked == everything.asked[stop_after:]


def test_wanted_sees_rows_as_a_later_call_would_read_them(tmp_path: Path) -> None:
    seen: list[float] = []

    def wanted(found: Found[Trial, Row]) -> list[Trial]:
        seen.extend(rows[0].measure for rows in found.values())
        return trials(1)

    assert run_trials(table(tmp_path), wanted, lambda trial: [Row(0, 1 / 3)])
    assert set(seen) == {0.333333}


def test_a_trial_that_is_wanted_twice_is_run_once(tmp_path: Path) -> None:
    training = Training()
    assert run_trials(table(tmp_path), lambda found: [*trials(2), *trials(2)], training)
    assert training.asked == trials(2)


def test_when_the_time_is_over_nothing_more_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("experiments.common.trials.time.monotonic", lambda: float(next(clock)))
    training = Training()
    assert not run_trials(table(tmp_path), lambda found: trials(50), training, limit_s=9.5)
    assert 0 < len(training.asked) < 10
    assert list(table(tmp_path).read()) == training.asked


def test_one_that_fails_does_not_stop_the_others_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_second(trial: Trial) -> None:
        if trial.seed == 1:
            raise ZeroDivisionError("by nothing")

    with pytest.raises(TrialsFailed, match=r"^1 trial failed, the first was name=.*seed=1.*ZeroDivisionError: by"):
        run_trials(table(tmp_path), lambda found: trials(4), Training(fail_second))
    assert [trial.seed for trial in table(tmp_path).read()] == [0, 2, 3]
    assert capsys.readouterr().out.count("FAILED") == 1
    assert run_trials(table(tmp_path), lambda found: trials(4), Training())


def test_after_three_failures_nothing_more_is_begun(tmp_path: Path) -> None:
    def fail(trial: Trial) -> None:
        raise RuntimeError

    training = Training(fail)
    with pytest.raises(TrialsFailed, match="3 trials failed"):
        run_trials(table(tmp_path), lambda found: trials(50), training)
    assert len(training.asked) == 3


def test_what_the_user_gave_wrong_is_said_at_once(tmp_path: Path) -> None:
    def refuse(trial: Trial) -> None:
        raise BadInput("there is no data; put it there")

    training = Training(refuse)
    with pytest.raises(BadInput, match="there is no data"):
        run_trials(table(tmp_path), lambda found: trials(3), training)
    assert len(training.asked) == 1


def test_progress_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[Trial, int]] = []
    run_trials(table(tmp_path), lambda found: trials(2), Training())
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 of 2: name=a, and b, rate=0.0666")
    run_trials(table(tmp_path), lambda found: trials(3), Training(), tell=lambda t, r: told.append((t, len(r))))
    assert told == [(trials(3)[2], 3)] and capsys.readouterr().out == ""


# ---------------------------------------------------------------- in processes


def train_elsewhere(trial: Trial, here: int) -> list[Row]:
    assert os.getpid() != here
    if trial.seed == 1:
        raise ZeroDivisionError("in another process")
    return rows_of(trial)


def never_end(trial: Trial) -> list[Row]:
    threading.Event().wait()
    raise AssertionError("nobody sets it")


def be_killed(trial: Trial) -> list[Row]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it was too late")


@pytest.mark.experiments
def test_several_processes_share_the_work_and_keep_what_did_not_fail(tmp_path: Path) -> None:
    train = partial(train_elsewhere, here=os.getpid())
    with pytest.raises(TrialsFailed, match="ZeroDivisionError: in another process"):
        run_trials(table(tmp_path), lambda found: trials(5), train, processes=2)
    found = table(tmp_path).read()
    assert sorted(trial.seed for trial in found) == [0, 2, 3, 4]
    assert all(rows == rows_of(trial) for trial, rows in found.items()), "one was run twice"
    assert not multiprocessing.active_children()


def test_at_the_limit_processes_are_ended(tmp_path: Path) -> None:
    assert not run_trials(table(tmp_path), lambda found: trials(3), never_end, processes=2, limit_s=0.01)
    assert not multiprocessing.active_children() and table(tmp_path).read() == {}


def hang_beside(trial: Trial, begun: Path) -> list[Row]:
    """The second trial hangs, and the first ends as soon as it does."""
    if trial.seed == 1:
        begun.touch()
        threading.Event().wait()
    while not begun.exists():
        threading.Event().wait(0.01)
    return rows_of(trial)


@pytest.mark.experiments
def test_ctrl_c_ends_a_trial_under_way_and_keeps_what_is_finished(tmp_path: Path) -> None:
    def wanted(found: Found[Trial, Row]) -> list[Trial]:
        if found:
            raise KeyboardInterrupt
        return trials(2)

    with pytest.raises(KeyboardInterrupt):
        run_trials(table(tmp_path), wanted, partial(hang_beside, begun=tmp_path / "begun"), processes=2)
    assert not multiprocessing.active_children() and list(table(tmp_path).read()) == trials(1)


@pytest.mark.experiments
def test_a_killed_process_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="was killed, most likely for memory; the same command goes on"):
        run_trials(table(tmp_path), lambda found: trials(1), be_killed, processes=2)
    assert not multiprocessing.active_children()
