"""A prompt shows a result or a replay as one line, a notebook as a small table."""

from __future__ import annotations

from pathlib import Path

import pytest

import quorate


def test_a_result_is_a_line_and_a_small_table(tmp_path: Path) -> None:
    engine = quorate.Simulated(4, "constant:1")
    result = quorate.train("digits", quorate.BackupSync(3, 1), engine, updates=3, out=tmp_path / "run")
    loss, measures = result.metrics.last_loss, result.evaluation
    assert repr(result) == (
        f"Result(backup 3+1, digits: updates 3, seconds 3, loss {loss:.4g}, accuracy {measures['accuracy']:.4g}, "
        f"test_loss {measures['test_loss']:.4g}, out {tmp_path / 'run'})"
    )
    shown = result._repr_html_()
    assert shown.startswith("<table><tr><th>run</th><td>backup 3+1, digits</td></tr>") and len(shown) < 600

    again = quorate.replay(tmp_path / "run")
    line = f"{again.lines:,} records agree, parameters compared"
    assert repr(again).startswith(f"Replay({line}; Result(backup 3+1, digits: updates 3, ")
    assert again._repr_html_().startswith(f"<p>{line}</p><table>")
    assert "decisions alone" in repr(quorate.replay(tmp_path / "run", gradients=False))


def test_without_gradients_and_with_hostile_names_it_is_still_text() -> None:
    result = quorate.train(None, quorate.FullSync(), quorate.Simulated(2, "constant:1"), updates=2)
    assert repr(result) == "Result(full-sync 2, no gradients: updates 2, seconds 2)"
    result.metrics.header["task"] = "<img src=x>"
    assert "<img" not in result._repr_html_()


@pytest.mark.parametrize("header", [{}, {"policy": None}])
def test_a_result_of_nothing_can_be_shown(header: dict[str, object]) -> None:
    from quorate.metrics import Metrics
    from quorate.run import Result

    empty = Result(Metrics(), {})
    empty.metrics.header = header
    assert repr(empty).startswith("Result(") and empty._repr_html_().startswith("<table>")
