"""Times from a trace: in order, wrapped, borrowed, and right-censored where a ticket ended early."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate.errors import BadInput
from quorate.latency import Recorded, parse_latency
from quorate.seeds import derive, uniform

HEADER = {"event": "run", "schema": 1, "quorate": "0.1.0"}
Event = dict[str, Any]


def start(ticket: int, worker: int, time_s: float) -> Event:
    return {"event": "start", "time": time_s, "ticket": ticket, "worker": worker, "version": 0}


def arrive(ticket: int, time_s: float) -> Event:
    return {"event": "arrive", "time": time_s, "ticket": ticket}


def cancel(ticket: int, time_s: float) -> Event:
    return {"event": "cancel", "time": time_s, "ticket": ticket}


def write(folder: Path, *events: Event) -> str:
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in (HEADER, *events)))
    return str(path)


def one_worker(folder: Path, *durations: tuple[float, bool]) -> str:
    """A trace whose worker 0 takes these times; those not observed are cancelled."""
    events = []
    for ticket, (seconds, observed) in enumerate(durations):
        events += [start(ticket, 0, 0.0), (arrive if observed else cancel)(ticket, seconds)]
    return write(folder, *events)


def test_a_worker_takes_its_recorded_times_in_the_order_of_their_starts(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        start(0, 0, 1.0),
        start(1, 1, 1.0),
        arrive(1, 1.5),
        {"event": "apply", "time": 1.5, "tickets": [1], "version": 1},
        start(2, 1, 1.5),
        arrive(0, 3.0),
        start(3, 0, 3.0),
        arrive(3, 3.25),
        arrive(2, 5.5),
        start(4, 0, 6.0),  # still running when the file ends
    )
    draw = parse_latency(f"trace:{path}").sampler(0, 2)
    assert [draw(0, step, 0, 0.0) for step in range(5)] == [2.0, 0.25, 2.0, 0.25, 2.0]
    assert [draw(1, step, 0, 0.0) for step in range(3)] == [0.5, 4.0, 0.5]


def test_the_text_reads_back(tmp_path: Path) -> None:
    path = one_worker(tmp_path, (1.0, True))
    model = Recorded(path)
    assert model.text() == f"trace:{path}"
    assert parse_latency(f" trace: {path} ") == model
    assert hash(parse_latency(model.text())) == hash(model)
    assert parse_latency(f"trace:{path}*slow:0=3").sampler(0, 1)(0, 0, 0, 0.0) == 3.0
    assert model.mean() is None
    assert model.longest() == 1.0


def test_a_worker_that_the_trace_lacks_borrows_from_another_place(tmp_path: Path) -> None:
    times = [1.0 + i for i in range(50)]
    path = one_worker(tmp_path, *((seconds, True) for seconds in times))
    draw = Recorded(path).sampler(3, 4)
    columns = [[draw(worker, step, 0, 0.0) for step in range(50)] for worker in range(4)]
    assert columns[0] == times
    assert all(sorted(column) == times for column in columns)
    assert len({column[0] for column in columns}) == 4


def test_borrowers_go_round_the_recorded_workers(tmp_path: Path) -> None:
    path = write(tmp_path, start(0, 0, 0.0), start(1, 4, 0.0), arrive(0, 1.0), arrive(1, 2.0))
    draw = Recorded(path).sampler(0, 6)
    assert [draw(worker, 0, 0, 0.0) for worker in range(6)] == [1.0, 2.0, 1.0, 2.0, 2.0, 2.0]


def test_a_ticket_that_ended_early_gets_a_longer_time(tmp_path: Path) -> None:
    events = [start(i, i, 0.0) for i in range(5)]
    events += [arrive(0, 1.0), arrive(1, 3.0), cancel(2, 2.0)]
    events += [{"event": "lost", "time": 2.5, "worker": 3, "tickets": [3, 4]}]
    model = Recorded(write(tmp_path, *events))
    assert model.durations == {
        0: [(1.0, True)],
        1: [(3.0, True)],
        2: [(2.0, False)],
        3: [(2.5, False)],
        4: [(2.5, False)],
    }
    draw = model.sampler(0, 5)
    assert [draw(worker, 0, 0, 0.0) for worker in range(5)] == [1.0, 3.0, 3.0, 3.0, 3.0]


def test_a_time_longer_than_all_observed_stands_for_itself(tmp_path: Path) -> None:
    draw = Recorded(one_worker(tmp_path, (1.0, True), (9.0, False), (1.0, False))).sampler(0, 1)
    assert [draw(0, step, 0, 0.0) for step in range(3)] == [1.0, 9.0, 1.0]


def test_a_cancelled_ticket_that_arrives_all_the_same_was_observed(tmp_path: Path) -> None:
    path = write(tmp_path, start(0, 0, 0.0), cancel(0, 1.0), arrive(0, 4.0), cancel(0, 5.0))
    assert Recorded(path).durations == {0: [(4.0, True)]}


@pytest.mark.parametrize(
    ("durations", "shares"),
    [
        # Beyond 2: 3 is one of four at risk; what remains is shared by 5 and 6 (a plain choice gives thirds).
        (
            [(1.0, True), (2.0, False), (3.0, True), (3.5, False), (5.0, True), (6.0, True)],
            {3.0: 1 / 4, 5.0: 3 / 8, 6.0: 3 / 8},
        ),
        # Cancelled at 2, a ticket was still at risk when another ended at 2.
        (
            [(2.0, False), (1.0, False), (2.0, True), (3.0, True), (4.0, True)],
            {2.0: 1 / 4, 3.0: 3 / 8, 4.0: 3 / 8},
        ),
    ],
)
def test_the_stand_in_follows_kaplan_and_meier(
    tmp_path: Path, durations: list[tuple[float, bool]], shares: dict[float, float]
) -> None:
    model = Recorded(one_worker(tmp_path, *durations))
    seeds = 4000
    counts = Counter(model.sampler(seed, 1)(0, 1, 0, 0.0) for seed in range(seeds))
    assert set(counts) == set(shares)
    for seconds, share in shares.items():
        assert counts[seconds] / seeds == pytest.approx(share, abs=0.03)


def test_the_true_mean_comes_back_from_a_run_that_cancels(tmp_path: Path) -> None:
    durations = []
    for i in range(6000):
        # Times of 1 + Exp(1), cancelled at 1 + Exp(1.5): two of five end early.
        full = 1.0 - math.log(uniform(derive(1, "time"), i))
        limit = 1.0 - 1.5 * math.log(uniform(derive(1, "limit"), i))
        durations.append((min(full, limit), full <= limit))
    draw = Recorded(one_worker(tmp_path, *durations)).sampler(0, 1)
    seen = math.fsum(seconds for seconds, _ in durations) / len(durations)
    mean = math.fsum(draw(0, step, 0, 0.0) for step in range(len(durations))) / len(durations)
    assert seen < 1.65, "what was seen is too short"
    assert mean == pytest.approx(2.0, rel=0.03)


GOOD = json.dumps(HEADER) + "\n" + json.dumps(start(0, 0, 2.0)) + "\n"
BAD_FILES = {
    "empty": ("", ["is empty", "line 1"]),
    "not json": ("time,worker\n1,2\n", ["line 1", "quorate trace"]),
    "another tool's json": ('{"event": "boot"}\n', ["line 1", "quorate trace"]),
    "a list": ("[1, 2]\n", ["line 1", "quorate trace"]),
    "no schema": ('{"event": "run"}\n', ["line 1", "quorate trace"]),
    "newer": ('{"event": "run", "schema": 3}\n', ["line 1", "schema 3", "1 to 2", "upgrade"]),
    "older": ('{"event": "run", "schema": 0}\n', ["line 1", "schema 0", "1 to 2", "release that wrote it"]),
    "torn": (GOOD + '{"event": "arrive", "time": 3.0, "tic', ["line 3", "torn", "delete"]),
    "deep nesting": (GOOD + "[" * 100_000 + "\n", ["line 3", "damaged", "delete"]),
    "a number of many digits": (GOOD + '{"event": "x", "time": ' + "9" * 5000 + "}\n", ["line 3", "damaged"]),
    "a time beyond": (GOOD + json.dumps({**start(1, 0, 3.0), "time": 10**400}) + "\n", ["line 3", "finite number"]),
    "a blank line": (GOOD + "\n", ["line 3", "torn"]),
    "no object": (GOOD + "7\n", ["line 3", "no event"]),
    "no time": (GOOD + '{"event": "arrive", "ticket": 0}\n', ["line 3", "None", "time"]),
    "no number": (GOOD + '{"event": "arrive", "ticket": 0, "time": NaN}\n', ["line 3", "nan", "time"]),
    "no ticket": (GOOD + '{"event": "arrive", "time": 3}\n', ["line 3", "None", "ticket"]),
    "no tickets": (GOOD + '{"event": "lost", "time": 3}\n', ["line 3", "None", "tickets"]),
    "no worker": (
        GOOD + '{"event": "start", "ticket": 1, "time": 3, "worker": -1}\n',
        ["line 3", "-1", "worker"],
    ),
    "a stranger": (
        GOOD + '{"event": "arrive", "ticket": 8, "time": 3}\n',
        ["line 3", "ticket 8", "never started"],
    ),
    "backwards": (GOOD + '{"event": "arrive", "ticket": 0, "time": 1}\n', ["line 3", "1.0 s", "2.0 s"]),
    "nothing arrived": (GOOD, ["1 started", "none that arrived", "longer run"]),
}


@pytest.mark.parametrize(("content", "words"), BAD_FILES.values(), ids=list(BAD_FILES))
def test_a_bad_file_is_refused_when_the_model_is_built(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput) as caught:
        parse_latency(f"trace:{path}")
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gone\.jsonl.*No such file"):
        parse_latency(f"trace:{tmp_path / 'gone.jsonl'}")
    binary = tmp_path / "model.bin"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BadInput, match=r"model\.bin.*quorate trace"):
        parse_latency(f"trace:{binary}")


@pytest.mark.parametrize("path", ["", " run.jsonl", "a*b.jsonl"])
def test_a_path_that_the_text_form_cannot_hold_is_refused(path: str) -> None:
    with pytest.raises(BadInput, match="is no path for a trace"):
        Recorded(path)


# ---------------------------------------------------------------- a table of step times


def written_table(folder: Path, steps: int = 6, name: str = "times.csv") -> Path:
    path = folder / name
    rows = [f"{step},{worker},{1 + step / 10 + worker}\n" for step in range(steps) for worker in (0, 1, 4)]
    path.write_text("step,worker,seconds\n" + "".join(rows))
    return path


@pytest.mark.parametrize("name", ["times.csv", "TIMES.CSV", "times.txt"])
def test_a_table_of_step_times_is_a_trace_too(tmp_path: Path, name: str) -> None:
    path = written_table(tmp_path, name=name)
    model = parse_latency(f"trace:{path}")
    draw = model.sampler(0, 5)
    assert [draw(0, step, step, 0.0) for step in range(7)] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.0])
    assert [draw(4, step, step, 0.0) for step in range(2)] == pytest.approx([5.0, 5.1])
    assert model.text() == f"trace:{path}" and model.longest() == pytest.approx(5 + 0.5)


def test_a_simulation_meets_the_workers_of_a_table(tmp_path: Path) -> None:
    path = written_table(tmp_path)
    engine = quorate.Simulated(2, f"trace:{path}")
    result = quorate.train(None, quorate.FullSync(), engine, updates=6)
    assert result.metrics.seconds == pytest.approx(sum(2 + step / 10 for step in range(6)))


def test_a_table_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file or directory; check the path"):
        parse_latency(f"trace:{tmp_path / 'gone.csv'}")
    path = tmp_path / "times.csv"
    path.write_text("step,worker,seconds\n0,0,fast\n")
    with pytest.raises(BadInput, match="line 2: seconds is 'fast'"):
        parse_latency(f"trace:{path}")
