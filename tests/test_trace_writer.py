"""The trace writer flushes periodically, also while no event comes, and never loses or doubles a line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from quorate import trace
from quorate.trace import TraceWriter


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_FLUSH_S", 0.0005)


def wait_for(path: Path, text: str) -> None:
    for _ in range(600):
        if path.read_text() == text:
            return
        time.sleep(0.1)
    raise AssertionError(f"it never said {text!r}")


def test_a_single_line_can_soon_be_read_by_others_without_another_one(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    writer.timer(1.5, 3)
    wait_for(tmp_path / "trace.jsonl", '{"event":"timer","time":1.5,"key":3}\n')
    writer.close()


def test_lines_written_while_others_are_handed_over_are_neither_lost_nor_doubled(tmp_path: Path, often: None) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    for number in range(100_000):
        writer.timer(0.5, number)
        if number % 10_000 == 0:
            size = writer.position()
            assert (tmp_path / "trace.jsonl").stat().st_size == size
    writer.close()
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    assert lines == [f'{{"event":"timer","time":0.5,"key":{number}}}' for number in range(100_000)]


def test_a_line_that_comes_during_a_write_waits_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_FLUSH_S", 3600.0)  # the flushing thread does nothing
    writer = TraceWriter(tmp_path / "trace.jsonl")
    file = writer._file

    class Slow:
        """Another line is written before this write is done."""

        def write(self, data: memoryview) -> int:
            writer.timer(2.0, 2)
            return file.write(data)

        def fileno(self) -> int:
            return file.fileno()

    writer.timer(1.0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_file", Slow())
        writer.position()
    writer.close()
    found = [json.loads(line)["key"] for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert found == [1, 2]


def test_a_full_disk_is_told_by_the_run_and_not_by_the_thread(
    tmp_path: Path, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    tried: list[int] = []

    def full() -> int:
        tried.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "position", full)
    writer.timer(1.0, 1)
    while len(tried) < 3:  # the thread tries, and tries again
        time.sleep(0.001)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        writer.flush()
    monkeypatch.undo()
    writer.close()
    assert (tmp_path / "trace.jsonl").read_text() == '{"event":"timer","time":1.0,"key":1}\n'


def test_the_header_is_on_disk_before_anything_else_happens(tmp_path: Path) -> None:
    """A kill a moment later leaves a run that can be started again."""
    writer = TraceWriter(tmp_path / "trace.jsonl")
    writer.run({"workers": 2})
    assert (tmp_path / "trace.jsonl").read_text().endswith('"workers": 2}\n')
    writer.joined(0.0, 0, 0)
    writer.close()


def test_a_trace_that_was_deleted_is_missed_and_can_move_with_all_it_has(tmp_path: Path, often: None) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    writer.timer(1.0, 1)
    writer.position()
    (tmp_path / "trace.jsonl").unlink()
    writer.timer(2.0, 2)
    with pytest.raises(FileNotFoundError, match="it was deleted or moved away"):
        writer.position()
    writer.move_to(tmp_path / "moved.jsonl")
    writer.timer(3.0, 3)
    writer.close()
    found = [json.loads(line)["key"] for line in (tmp_path / "moved.jsonl").read_text().splitlines()]
    assert found == [1, 2, 3]
