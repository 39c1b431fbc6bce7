"""A trace is followed as it grows, is cut, is replaced or turns out to be none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate.events import Ticket
from quorate.reporting.live import watcher as following
from quorate.reporting.live.watcher import Follower, Watcher, trace_file

from .conftest import HEADER, GrowingTrace
from .runs import begin, end, round_of


@contextmanager
def followed(path: Path) -> Iterator[Follower]:
    follower = Follower(path)
    try:
        yield follower
    finally:
        follower.close()


def everything(follower: Follower) -> list[dict[str, Any]]:
    """All records that are there now."""
    found: list[dict[str, Any]] = []
    while True:
        before = follower.offset_bytes
        found += follower.read().records
        if follower.offset_bytes == before:
            return found


def test_records_come_once_each_as_the_file_grows(trace: GrowingTrace) -> None:
    with followed(trace.path) as follower:
        assert follower.read().records == []
        assert not follower.exists
        begin(trace)
        assert [record["event"] for record in everything(follower)] == ["run", "join", "join", "join"]
        round_of(trace, 0)
        assert [record["event"] for record in everything(follower)][-2:] == ["cancel", "evaluate"]
        assert everything(follower) == []


def test_half_a_line_waits_until_it_is_whole(trace: GrowingTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(trace)
    text = '{"event":"join","time":1.5,"worker":9,"incarnation":0}\n'
    with followed(trace.path) as follower:
        everything(follower)
        trace._write(text[:20])
        assert everything(follower) == []
        trace._write(text[20:-1])
        assert everything(follower) == []
        trace._write("\n")
        assert everything(follower) == [json.loads(text)]
    monkeypatch.setattr(following, "CHUNK_BYTES", 7)  # every line is longer than what is read at once
    with followed(trace.path) as follower:
        assert everything(follower) == [json.loads(line) for line in trace.path.read_text().splitlines()]


def test_a_file_that_got_shorter_is_read_anew(trace: GrowingTrace) -> None:
    begin(trace)
    checkpoint = trace.path.stat().st_size
    round_of(trace, 0)
    with followed(trace.path) as follower:
        assert follower.read().anew
        everything(follower)
        with trace.path.open("r+b") as file:
            file.truncate(checkpoint)
        news = follower.read()
        assert news.anew
        assert len(news.records) == 4


def test_a_file_that_was_cut_and_grew_again_in_between_is_read_anew(trace: GrowingTrace) -> None:
    begin(trace)
    checkpoint = trace.path.stat().st_size
    round_of(trace, 0, loss=1.0)
    with followed(trace.path) as follower:
        everything(follower)
        with trace.path.open("r+b") as file:
            file.truncate(checkpoint)
        round_of(trace, 0, loss=2.0)
        round_of(trace, 1)
        news = follower.read()
        assert news.anew
        losses = [record["loss"] for record in news.records if record["event"] == "apply"]
        assert losses == [2.0, 1.0]


def test_a_file_that_was_replaced_is_read_anew(trace: GrowingTrace, tmp_path: Path) -> None:
    begin(trace, seed=1)
    with followed(trace.path) as follower:
        everything(follower)
        other = GrowingTrace(tmp_path / "other.jsonl")
        begin(other, seed=2)
        other.path.replace(trace.path)
        assert follower.read().records[0]["seed"] == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("step,worker,seconds\n0,0,1.5\n", "not a quorate trace"),
        ('{"event": "start", "time": 0}\n', "not a quorate trace"),
        ("[1, 2]\n", "not a quorate trace"),
        ("\x00\x01\n", "not a quorate trace"),
        (json.dumps({**HEADER, "event": "run", "schema": 99}) + "\n", "schema 99"),
        (json.dumps({**HEADER, "event": "run", "schema": 1}) + '\n{"event":"jo\n{}\n', "line 2 is not a whole record"),
        (json.dumps({**HEADER, "event": "run", "schema": 1}) + "\n1],[2\n", "line 2 is not a whole record"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_line(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "trace.jsonl").write_text(content)
    with followed(tmp_path / "trace.jsonl") as follower, pytest.raises(quorate.BadInput, match=words):
        everything(follower)


def test_what_can_be_no_trace_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "folder" / "trace.jsonl").mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    for run, words in (
        ("file.txt/001", "cannot be read: Not a directory"),
        ("folder", "is no plain file"),
        ("pipe", "cannot be read: Not a directory"),
        ("x" * 300, "cannot be read: File name too long"),
    ):
        with followed(trace_file(tmp_path / run)) as follower, pytest.raises(quorate.BadInput, match=words):
            follower.read()


def test_a_run_is_named_by_its_folder_or_its_file(tmp_path: Path) -> None:
    assert trace_file(tmp_path / "not-yet") == tmp_path / "not-yet" / "trace.jsonl"
    assert trace_file(tmp_path / "not-yet.jsonl") == tmp_path / "not-yet.jsonl"
    (tmp_path / "old").write_text("")
    assert trace_file(tmp_path / "old") == tmp_path / "old"


def test_a_watcher_says_how_the_run_stands(trace: GrowingTrace) -> None:
    def until(status: str) -> dict[str, Any]:
        number = 0
        while True:
            published = watcher.wait(number, 60)
            assert published.number > number, f"it never was {status}"
            number = published.number
            if published.content["status"] == status:
                return published.content

    with Watcher(trace.path.parent) as watcher:
        assert watcher.published.content["status"] == "absent"
        begin(trace)
        round_of(trace, 0)
        assert until("running")["state"]["updates"] == 1
        trace._write('{"event":"arrive","time":5,"ticket":77}\n')
        content = until("unreadable")
        assert "damaged at line 13;" in content["problem"]
        assert content["state"]["updates"] == 1
        trace.path.unlink()
        begin(trace)
        end(trace, 0)
        content = until("ended")
        assert (content["problem"], content["state"]["updates"]) == (None, 0)


@pytest.mark.parametrize("wrong", [{"engine": 3}, {"policy": ["x"]}, {"workers": {}}, {"updates": "many"}])
def test_a_header_of_another_shape_is_no_end_of_the_watcher(trace: GrowingTrace, wrong: dict[str, Any]) -> None:
    begin(trace, **wrong)
    round_of(trace, 0)
    end(trace, 1)
    with Watcher(trace.path) as watcher:
        assert watcher.published.content["status"] in ("ended", "unreadable")


@pytest.mark.parametrize("time", ["Infinity", "1e999", "NaN"])
def test_a_time_that_is_none_is_damage(trace: GrowingTrace, time: str) -> None:
    begin(trace)
    round_of(trace, 0)
    trace.started(1.0, Ticket(3, 0, 0, 1, 3, 4))
    trace.arrived(1.5, Ticket(3, 0, 0, 1, 3, 4), None)
    trace._write(f'{{"event":"apply","time":{time},"version":2,"tickets":[3],"reason":"quorum"}}\n')
    with Watcher(trace.path) as watcher:
        content = watcher.published.content
    if time != "NaN":  # which compares as neither more nor less, and is shown as nothing
        assert content["status"] == "unreadable"
        assert "is damaged at line 15; what is shown is the run up to there" in content["problem"]
    json.loads(watcher.published.body)
