"""How long is too long: told by the slowest of the recent answers."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from quorate.engines.shared.worker_health import AnswerTimes

seconds = st.floats(0, 1e4) | st.sampled_from([0.0, 0.5, 0.5000001, 3.0])
stretches = st.lists(st.tuples(seconds, st.sampled_from([1, 2, 100, 254, 255, 256, 257])), max_size=6)


@given(stretches=stretches)
@example(stretches=[(5.0, 1), (1.0, 256)])
@example(stretches=[(5.0, 1), (1.0, 255)])
@example(stretches=[(1.0, 100), (5.0, 2), (2.0, 1), (1.0, 254)])
def test_the_slowest_of_the_last_256(stretches: list[tuple[float, int]]) -> None:
    times, answers = AnswerTimes(), [answer for answer, often in stretches for _ in range(often)]
    for answer in answers:
        times.add(answer)
    slowest = max(answers[-256:], default=3.0)
    assert times.limits() == (0.25 + 3 * slowest, 10 + 50 * slowest, 60 + 200 * slowest)


@given(answers=st.lists(seconds, min_size=1, max_size=300))
def test_no_answer_that_is_remembered_would_be_too_late(answers: list[float]) -> None:
    """Also not for a worker that is stopped for as long as an answer takes."""
    times = AnswerTimes()
    for answer in answers:
        times.add(answer)
        limits = times.limits()
        assert answer < limits.stopped < limits.silent < limits.hanging


def test_before_the_first_answer_there_is_time_for_a_slow_one() -> None:
    assert AnswerTimes().limits().stopped > 5


@given(answers=st.lists(seconds, max_size=10), patience_s=st.floats(0, 1e5), warm=st.booleans())
def test_patience_bounds_every_silence_that_is_not_as_long_as_answers_take(
    answers: list[float], patience_s: float, warm: bool
) -> None:
    patient, times = AnswerTimes(), AnswerTimes(patience_s)
    for answer in answers:
        patient.add(answer)
        times.add(answer)
    limits, slowest = times.limits(warm), max(answers, default=0.0)
    assert max(limits) <= max(patience_s, 5.0, 1 + 3 * slowest)
    assert all(slowest < limit <= unbounded for limit, unbounded in zip(limits, patient.limits(warm), strict=True))
