"""What a plan says besides its figures: what to be careful of, ties, intervals, alternatives, the line to paste."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quorate
from quorate.cli import main
from quorate.planning import plan
from quorate.planning.recommendation import recommend, why_not
from quorate.planning.splits import split_times
from quorate.planning.world import effort_unknown
from tests.planning.worlds import record, world


def on_a_machine(run: Path, cores: int, core_wait: float | None, latency: str | None = None) -> Path:
    """A simulated run's trace as if real workers had made it, waiting for cores for a share of their time."""
    trace = run / "trace.jsonl"
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    records[0]["engine"] = {"name": "local", "latency": latency, "threads": 1, "device": "cpu"}
    records[0]["machine"] = {"cores": cores, "load": 0.5, "workers": records[0]["workers"]}
    started = {one["ticket"]: one["time"] for one in records if one["event"] == "start"}
    ends = [one for one in records if one["event"] in ("arrive", "cancel")]
    busy_s = sum(one["time"] - started[one["ticket"]] for one in ends)
    if core_wait is not None:
        records[-1]["core_wait_s"] = core_wait * busy_s
    trace.write_text("".join(json.dumps(one) + "\n" for one in records))
    return run


def said(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """The lines of `quorate plan`, as a wide terminal has them."""
    assert main(["plan", *map(str, words)]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")


# ---------------------------------------------------------------- a machine with too few cores


def test_workers_that_shared_cores_are_said_first_and_no_split_is_foretold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The issue's case: planned from 6+2 on two cores, a plan said "Take 2+6 (×4.25)", and 2+6 was no faster."""
    run = on_a_machine(record(tmp_path / "run", "lognormal:0.05,1", 6, 2, 100), cores=2, core_wait=0.8)
    lines = said(capsys, run)
    assert lines[0].startswith("Careful: 8 workers shared 2 cores and waited for one 80% of their time")
    assert "--workers 2" in lines[0]
    answer = next(line for line in lines if line.startswith("Keep"))
    assert answer.startswith("Keep 6+2: ") and "no other split can be judged" in answer
    assert not any("×" in line for line in lines)
    made = plan(run)
    assert made.recommendation.speedup is None and made.others == ()
    assert made.as_dict()["cautions"][0] == made.cautions[0]
    assert "×" not in made._repr_html_() and "<td>2+6</td>" not in made._repr_html_()
    assert plan(run, machines=12).sentence.startswith("No split of 12 machines can be judged from this run")
    assert lines[-2:] == ["Paste: quorate.BackupSync(6, 2)", "Or:    quorate train --workers 6+2"]


@pytest.mark.parametrize("policy", [quorate.SoftSync(2), quorate.KBatchSync(2)], ids=repr)
def test_a_quorum_that_may_take_several_gradients_of_a_worker_is_no_split(
    policy: quorate.Policy, tmp_path: Path
) -> None:
    quorate.train(None, policy, quorate.Simulated(8, "lognormal:0.05,1"), updates=400, out=tmp_path / "run")
    made = plan(on_a_machine(tmp_path / "run", cores=2, core_wait=0.8))
    assert made.recommendation.is_kept and made.recommendation.split == "8+0"


@pytest.mark.parametrize(
    ("cores", "core_wait", "latency", "is_shared"),
    [
        (8, 0.05, None, False),
        (2, 0.1, None, False),  # eight workers that mostly sleep need no eight cores
        (2, None, None, True),  # killed before it could say
        (2, None, "pause:0.05,0.05,10", False),
        (8, 0.5, None, False),  # other programs took the cores: said, but backups may well help
    ],
)
def test_what_counts_as_shared(
    tmp_path: Path, cores: int, core_wait: float | None, latency: str | None, is_shared: bool
) -> None:
    made = plan(on_a_machine(record(tmp_path / "run", "lognormal:0.05,1", 8, 0, 100), cores, core_wait, latency))
    assert made.recommendation.is_kept == (made.recommendation.backups == 0) == is_shared
    assert any("shared" in caution for caution in made.cautions) == is_shared
    if cores == 8 and core_wait == 0.5:
        assert "waited for a core 50% of their time, though there were enough for 8" in made.cautions[0]


def test_a_real_run_records_cores_load_and_the_wait_for_them(tmp_path: Path) -> None:
    quorate.train("digits", quorate.FullSync(), quorate.Local(2), updates=25, out=tmp_path / "run")
    lines = (tmp_path / "run" / "trace.jsonl").read_text().splitlines()
    header, end = json.loads(lines[0]), json.loads(lines[-1])
    assert header["machine"]["cores"] >= 1 and header["machine"]["workers"] == 2
    assert header["machine"]["load"] is None or header["machine"]["load"] >= 0
    assert end["core_wait_s"] >= 0
    assert quorate.replay(tmp_path / "run").lines > 0
    assert plan(tmp_path / "run").machines == 2


# ---------------------------------------------------------------- a run that cancels late work


def test_a_run_that_cancels_says_first_what_is_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, record(tmp_path / "run", "shifted-exp:0.05,0.05", 6, 2, 400))
    assert lines[0].startswith("Careful: the run waited for 6 of 8 arrivals")
    assert "cancelled" in lines[0] and "guess" in lines[0] and "full-sync" in lines[0] and "--late finish" in lines[0]


def test_a_gain_over_what_was_guessed_reaches_down_to_what_was_seen(tmp_path: Path) -> None:
    """Cancelled work took at least as long as until it was cancelled: that bounds the gain from below."""
    found = plan(record(tmp_path / "run", "shifted-exp:0.05,0.05", 5, 3, 400)).recommendation
    assert found.speedup is not None and found.speedup_low is not None
    assert found.speedup_low < found.speedup < found.speedup_high
    whole = plan(record(tmp_path / "all", "shifted-exp:0.05,0.05", 8, 0, 400)).recommendation
    assert whole.speedup_low is not None and whole.speedup is not None
    assert found.speedup_low / found.speedup < whole.speedup_low / whole.speedup


# ---------------------------------------------------------------- ties, intervals


def tied_world(rounds: int, seed: int = 0) -> Any:
    """Quorums of 4 and of 6 reach the target equally soon but for chance; 7 and 8 are far behind."""
    random = np.random.default_rng(seed)
    seconds = np.empty((rounds, 8))
    seconds[:, :4] = 1.0
    seconds[:, 4:6] = 1.5 * random.lognormal(0.005, 0.1, (rounds, 1))
    seconds[:, 6:] = 9.0
    return world(seconds)


@pytest.mark.parametrize("seed", range(5))
def test_of_splits_that_are_equal_the_one_with_fewest_backups_is_taken(seed: int) -> None:
    """4 gradients in 1 s, or 6 in 1.5 s: 50 % of the computing is wasted, or 25 %."""
    found = recommend(split_times(tied_world(60, seed), "cancel"), effort_unknown(), 8)
    assert (found.quorum, found.backups) == (6, 2)
    assert found.equals == ("4+4",)
    assert "4+4 is equal to it" in found.reason and "fewest backups" in found.reason


def test_what_rounds_can_tell_apart_is_no_tie() -> None:
    seconds = tied_world(4000).seconds
    seconds[:, 4:6] *= 1.04
    found = recommend(split_times(world(seconds), "cancel"), effort_unknown(), 8)
    assert (found.quorum, found.equals) == (4, ())


def test_a_tie_never_costs_more_than_the_interval_wanted() -> None:
    """Few wild rounds: nearly every split lies within chance of the best, and is not taken for its equal."""
    random = np.random.default_rng(1)
    times = split_times(world(random.pareto(1.3, (40, 8)) + 0.05), "cancel")
    found = recommend(times, effort_unknown(), 8)
    cost = times.mean / np.arange(1, 9)
    assert cost[found.quorum - 1] <= 1.05 * cost.min()


def test_equal_by_formula_too() -> None:
    found = plan(latency="constant:1", machines=4, noise_scale=0, batch_size=1).recommendation
    assert found.backups == 0 and found.equals == ("3+1", "2+2", "1+3")


def test_the_gain_has_an_interval_that_shrinks_with_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    widths = []
    for rounds in (60, 2000):
        run = record(tmp_path / str(rounds), "pause:0.05,0.05,10", 8, 0, rounds)
        found = plan(run).recommendation
        assert found.speedup_low is not None and found.speedup_low < found.speedup < found.speedup_high  # type: ignore[operator]
        widths.append(found.speedup_high / found.speedup_low)
    assert widths[1] < widths[0]
    answer = next(line for line in said(capsys, run) if line.startswith("Take"))
    assert re.search(r"×2\.\d\d as fast to the target as 8\+0 \(95 %: 2\.\d\d to \d\.\d\d\)", answer), answer


def test_a_factor_says_against_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, record(tmp_path / "run", "pause:0.05,0.05,10", 8, 0, 300))
    assert any("as fast to the target as 8+0" in line for line in lines)
    assert any("updates: beside the split that needs fewest; time: beside the split marked ▶" in line for line in lines)


@pytest.mark.parametrize(("half", "noted"), [(0.0504, False), (0.0512, True), (0.3, True), (0.04, False)])
def test_an_interval_is_not_wider_than_the_same_number(half: float, noted: bool) -> None:
    """It said that ±5% is wider than the ±5% wanted."""
    from quorate.planning.plan import wider_than_wanted

    text = wider_than_wanted(half, 0.05, "a test", 100, 120)
    assert (text is not None) == noted
    if text is not None:
        wide, wanted = re.findall(r"±([\d.]+%)", text)
        assert wide != wanted == "5%"


# ---------------------------------------------------------------- other policies, slow workers


def test_a_policy_that_is_ahead_in_the_table_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(tmp_path / "run", "shifted-exp:0.001,0.05", 8, 0, 300)
    made = plan(run)
    ahead = [one for one in made.others if not one.is_lower_bound and one.time < 0.9 * made.recommendation.time]
    assert ahead, "this world is one where k-batch is ahead"
    lines = said(capsys, run)
    for one in ahead:
        (line,) = (line for line in lines if line.startswith(f"{one.label[0].upper()}{one.label[1:]} is ahead"))
        assert f"--policy {one.policy}" in line and "simulat" in line
    assert not any(line.startswith(("Async", "Softsync")) and "ahead" in line for line in lines)


@pytest.mark.parametrize(("lead", "is_said"), [(0.994, True), (0.9998, False)])
def test_a_policy_that_the_table_shows_ahead_is_explained_however_little_it_is(lead: float, is_said: bool) -> None:
    made = plan(latency="lognormal:0.05,0.15", machines=4)
    k_batch = next(one for one in made.others if one.policy == "k-batch")
    close = dataclasses.replace(k_batch, time=lead * made.recommendation.time)
    assert bool(why_not((close,), made.recommendation)) == is_said


def test_nobody_always_slow_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, record(tmp_path / "run", "shifted-exp:0.05,0.02", 8, 0, 100))
    assert any(line.startswith("Nobody is always slow") for line in lines)


def test_one_of_two_can_be_always_slow(tmp_path: Path) -> None:
    made = plan(record(tmp_path / "run", "shifted-exp:0.05,0.005*slow:1=3", 2, 0, 100))
    assert [slow.worker for slow in made.slow] == [1]
    assert made.slow[0].factor == pytest.approx(3, rel=0.1)
    assert not plan(record(tmp_path / "even", "shifted-exp:0.05,0.05", 2, 0, 100)).slow


# ---------------------------------------------------------------- the line to paste, numbers, Python


@pytest.mark.parametrize(
    ("words", "python", "command"),
    [
        (("--latency", "pause:0.05,0.01,10", "--machines", 32), "quorate.BackupSync(30, 2)", "--workers 30+2"),
        (("--latency", "constant:1", "--machines", 4), "quorate.FullSync()", "--workers 4"),
        (
            ("--latency", "pause:0.05,0.05,10", "--machines", 8, "--late", "finish", "--what-if", "machines=12"),
            'quorate.BackupSync(5, 3, late="finish")',
            "--workers 5+3 --late finish",
        ),
    ],
)
def test_it_ends_with_the_line_to_paste(
    words: tuple[object, ...], python: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, *words)[-2:] == [f"Paste: {python}", f"Or:    quorate train {command}"]
    policy = eval(python, {"quorate": quorate})
    assert isinstance(policy, quorate.Policy)


def test_no_number_is_written_with_an_exponent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker 120 times as slow was "1.2e+02×"."""
    worlds: list[tuple[object, ...]] = [
        (record(tmp_path / "slow", "shifted-exp:0.05,0.001*slow:3=12345", 8, 0, 60),),
        ("--latency", "shifted-exp:1e6,1e7", "--machines", 300, "--noise-scale", "1e9", "--batch-size", 1),
        ("--latency", "shifted-exp:1e-7,1e-8", "--machines", 8, "--noise-scale", "1e-9", "--batch-size", 1000000),
        ("--latency", "lognormal:1e-5,3", "--machines", 16, "--iterations", "1:1e9,16:1e-3"),
    ]
    for words in worlds:
        text = "\n".join(said(capsys, *words))
        text = re.sub(r"\blatency \S+|Fits to all.*|fitted law, \S+", "", text)  # a model's text is typed, not read
        assert not re.search(r"\d[eE][-+]?\d", text), re.findall(r".*\d[eE][-+]?\d.*", text)


def test_plan_has_a_real_signature() -> None:
    public, inner = inspect.signature(quorate.plan), inspect.signature(plan)
    assert public.parameters.keys() == inner.parameters.keys()
    assert all(one.kind is not one.VAR_KEYWORD for one in public.parameters.values())
    assert [one.default for one in public.parameters.values()] == [one.default for one in inner.parameters.values()]
    assert public.return_annotation == "Plan" and public.parameters["machines"].annotation == "int | None"


def test_a_plan_shows_itself(tmp_path: Path) -> None:
    made = quorate.plan(latency="pause:0.05,0.05,10", machines=8)
    assert repr(made).startswith("Plan(take 6+2 of 8 machines, ×") and len(repr(made)) < 120
    html = made._repr_html_()
    assert "<table" in html and html.count("<tr") == 9 and "quorate.BackupSync(6, 2)" in html
    tricky = tmp_path / "<b>run"
    assert "<b>run" not in plan(record(tricky, "pause:0.05,0.05,10", 8, 0, 60))._repr_html_()


# ---------------------------------------------------------------- step times of a script


def table(path: Path, waiting_s: float | None, slow: dict[int, str] | None = None, core_wait: float = 0.0) -> Path:
    """Four processes for 100 steps, 2 ms of their own each, and an all-reduce; slow ones lose 20 ms in a phase."""
    random = np.random.default_rng(0)
    phases = ("data", "forward", "backward", "optimizer")
    lines = ["step,worker,seconds,data,forward,backward,optimizer,waiting,core_wait,cores"]
    for step in range(100):
        own = random.uniform(0.0004, 0.0006, (4, 4))
        for worker, phase in (slow or {}).items():
            own[worker, phases.index(phase)] += 0.02
        seconds = own.sum(axis=1)
        for worker in range(4):
            waits = "" if waiting_s is None else seconds.max() - seconds[worker] + waiting_s
            cells = [step, worker, seconds[worker], *own[worker], waits, core_wait, 0.5]
            lines.append(",".join(map(str, cells)))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_all_reduce_of_a_script_is_in_its_plan(tmp_path: Path) -> None:
    """It was left out: 1.85 ms for a step of 8 ms, and gains such as ×63.95."""
    slow = {3: "data"}
    without, with_it = (plan(table(tmp_path / f"{wait}.csv", wait, slow)) for wait in (None, 0.006))
    for one, more in zip(without.splits, with_it.splits, strict=True):
        assert more.mean == pytest.approx(one.mean + 0.006, rel=1e-3)
    assert with_it.recommendation.speedup < without.recommendation.speedup  # type: ignore[operator]
    assert any("all-reduce, 6.00 ms a step, is in every figure" in note for note in with_it.notes)
    assert not with_it.cautions
    assert "all-reduce is not in the table" in without.cautions[0] and "larger than" in without.cautions[0]


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer"])
def test_a_slow_process_is_named_with_its_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str], phase: str) -> None:
    lines = said(capsys, table(tmp_path / "times.csv", 0.006, {2: phase}))
    (line,) = (line for line in lines if line.startswith("Worker 2 is always slow"))
    assert f"in {phase}" in line


def test_processes_that_shared_cores_are_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, table(tmp_path / "times.csv", 0.006, core_wait=0.6))
    assert lines[0].startswith("Careful: 2 processes shared each core and waited for it 60% of their time")
    assert any(line.startswith("Keep 4+0") for line in lines)


def test_a_table_without_phases_will_do(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("step,worker,seconds\n" + "".join(f"{step},{w},{1 + w}\n" for step in range(50) for w in range(3)))
    assert [slow.part for slow in plan(path).slow] == [None]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.99999, "1.00 s"),
        (0.9994, "999 ms"),
        (0.00099999, "1.00 ms"),
        (1234.5, "1,234 s"),
        (2e-7, "0 s"),
        (0.05, "50.0 ms"),
    ],
)
def test_seconds_are_rounded_before_their_unit_is_chosen(value: float, text: str) -> None:
    from quorate.number_format import seconds

    assert seconds(value) == text
