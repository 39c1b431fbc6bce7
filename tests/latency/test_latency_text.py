"""From text to model, and the sentences that refuse what is not one."""

import math

import pytest

from quorate.errors import BadInput
from quorate.latency import (
    Changing,
    Chen2016,
    Constant,
    Latency,
    Lognormal,
    Pareto,
    Pause,
    Pauses,
    Quantiles,
    ShiftedExponential,
    Slow,
    Spells,
    parse_latency,
)

MODELS = {
    "constant:0.05": Constant(0.05),
    "shifted-exp:0.05,0.025": ShiftedExponential(shift=0.05, exp_mean=0.025),
    "lognormal:0.05,0.4": Lognormal(median=0.05, sigma=0.4),
    "pareto:0.05,2.5": Pareto(scale=0.05, alpha=2.5),
    "quantiles:0.05@0,0.06@0.5,0.2@1": Quantiles(points=((0.05, 0), (0.06, 0.5), (0.2, 1))),
    "pause:0.05,0.04,10": Pause(base=0.05, probability=0.04, factor=10),
    "chen2016": Chen2016(),
    "shifted-exp:0.05,0.025*slow:3=4,5=1.5": Slow(ShiftedExponential(0.05, 0.025), {5: 1.5, 3: 4}),
    "constant:1*pauses:0.05,10": Pauses(Constant(1), probability=0.05, factor=10),
    "constant:1*spells:60,5,3": Spells(Constant(1), every_s=60, length_s=5, factor=3),
    "constant:1*spells:60,5,3,0.25": Spells(Constant(1), 60, 5, 3, share=0.25),
    "chen2016*slow:0=2*pauses:0.01,3*slow:0=3": Slow(Pauses(Slow(Chen2016(), {0: 2}), 0.01, 3), {0: 3}),
    "constant:1->60->pause:0.05,0.1,10*slow:1=2": Changing((Constant(1), Slow(Pause(0.05, 0.1, 10), {1: 2})), (60,)),
    "constant:1->0.5->constant:2->2->constant:3": Changing((Constant(1), Constant(2), Constant(3)), (0.5, 2)),
}


@pytest.mark.parametrize(("text", "model"), MODELS.items())
def test_every_form_is_read_and_written(text: str, model: Latency) -> None:
    assert parse_latency(text) == model
    assert model.text() == text


def test_spaces_do_not_matter() -> None:
    spaced = "  shifted-exp : 0.05 , 0.025  *  slow : 3 = 4 , 5 = 1.5 "
    assert parse_latency(spaced) == MODELS["shifted-exp:0.05,0.025*slow:3=4,5=1.5"]
    assert parse_latency(" quantiles: 0.05 @ 0, 0.2 @ 1 ") == Quantiles(((0.05, 0), (0.2, 1)))


BAD_TEXTS = [
    ("gauss:1", ["'gauss'", "constant", "shifted-exp", "chen2016", "trace"]),
    ("", ["''", "choose one of"]),
    ("constant:1*wobble:2", ["'wobble'", "pauses", "slow", "spells"]),
    ("slow:3=4", ["'slow:3=4'", "cannot come first", "constant:0.05*slow:3=4"]),
    ("constant", ["constant takes 1 number,", "not the 0", "constant:SECONDS", "constant:0.05"]),
    ("constant:1,2", ["not the 2", "'1,2'", "constant:SECONDS"]),
    ("shifted-exp:0.05", ["takes 2 numbers", "not the 1", "shifted-exp:SHIFT_S,MEAN_S"]),
    ("chen2016:3", ["takes 0 numbers", "'3'"]),
    ("constant:1*spells:1,2", ["takes 3 to 4 numbers", "'1,2'", "EVERY_S"]),
    ("constant:fast", ["'fast'", "not a number", "constant:0.05"]),
    ("lognormal:0.05,", ["''", "not a number"]),
    ("constant:-1", ["seconds", "-1.0", "above 0"]),
    ("constant:0", ["seconds", "0.0", "above 0"]),
    ("constant:nan", ["nan", "finite"]),
    ("constant:inf", ["inf", "finite"]),
    ("shifted-exp:-0.1,1", ["shift", "-0.1", "at least 0"]),
    ("shifted-exp:0.1,-1", ["exp_mean", "-1.0", "above 0"]),
    ("lognormal:0,1", ["median", "0.0", "above 0"]),
    ("lognormal:1,-1", ["sigma", "-1.0", "at least 0"]),
    ("lognormal:1,11", ["sigma", "11.0", "at most 10"]),
    ("pareto:-2,1", ["scale", "-2.0", "above 0"]),
    ("pareto:1,0", ["alpha", "0.0", "above 0"]),
    ("pareto:1,0.01", ["pareto:1,0.01", "largest float"]),
    ("pause:0.05,1.5,10", ["probability", "1.5", "at most 1"]),
    ("pause:0.05,0.5,0.5", ["factor", "0.5", "at least 1"]),
    ("quantiles:0.05", ["'0.05'", "'@'", "0.05@0,0.06@0.5,0.2@1"]),
    ("quantiles:0.05@0,x@1", ["'x'", "not a number"]),
    ("quantiles:0.05@0.1,0.2@1", ["[0.1, 1.0]", "from 0 to 1"]),
    ("quantiles:0.05@0,0.2@0.9", ["[0.0, 0.9]", "from 0 to 1"]),
    ("quantiles:0.05@0,0.2@0.7,0.3@0.6,0.4@1", ["0.3@0.6", "0.2@0.7", "levels must rise"]),
    ("quantiles:0.05@0,0.2@0.5,0.1@1", ["0.1@1", "0.2@0.5", "not fall"]),
    ("quantiles:-0.05@0,0.2@1", ["-0.05", "above 0"]),
    ("constant:1*slow:3", ["'3'", "'='"]),
    ("constant:1*slow:", ["''", "'='", "WORKER=FACTOR"]),
    ("constant:1*slow:first=3", ["'first'", "worker number"]),
    ("constant:1*slow:-1=3", ["worker -1", "from 0"]),
    ("constant:1*slow:1=3,1=4", ["worker 1", "twice"]),
    ("constant:1*slow:1=0", ["worker 1", "0.0", "above 0"]),
    ("constant:1*pauses:-0.1,2", ["probability", "-0.1"]),
    ("constant:1*pauses:0.1,0.2", ["factor", "0.2", "at least 1"]),
    ("constant:1*spells:0,0,2", ["every_s", "0.0", "above 0"]),
    ("constant:1*spells:5,6,2", ["length_s", "6.0", "at most 5"]),
    ("constant:1*spells:5,1,0.5", ["factor", "0.5"]),
    ("constant:1*spells:5,1,2,3", ["share", "3.0", "at most 1"]),
    ("constant:1e300*pauses:0.5,1e300", ["constant:1e+300*pauses:0.5,1e+300", "largest float"]),
    ("constant:1e300*slow:0=1e300", ["largest float"]),
    ("constant:1e300*spells:2,1,1e300", ["largest float"]),
    ("trace:", ["''", "trace:PATH"]),
    ("constant:1->60", ["'constant:1->60'", "lacks a time or a model", "MODEL->SECONDS->MODEL"]),
    ("constant:1->soon->constant:2", ["'soon'", "not a number", "MODEL->SECONDS->MODEL"]),
    ("constant:1->0->constant:2", ["time of a change", "0.0", "above 0"]),
    ("constant:1->inf->constant:2", ["time of a change", "inf", "finite"]),
    ("constant:1->9->constant:2->9->constant:3", ["9 s comes after one at 9 s", "must rise"]),
    ("constant:1->9->gauss:2", ["'gauss'", "shifted-exp"]),
    ("constant:1->9->", ["''", "choose one of"]),
    ("->9->constant:1", ["''", "choose one of"]),
]


@pytest.mark.parametrize(("text", "words"), BAD_TEXTS)
def test_a_bad_text_is_refused_with_the_value_the_rule_and_the_remedy(text: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        parse_latency(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "0.05", None, True])
def test_a_model_is_checked_when_built(value: float) -> None:
    with pytest.raises(BadInput, match="seconds of constant is"):
        Constant(value)


def test_a_slow_worker_that_the_run_lacks_is_refused() -> None:
    with pytest.raises(BadInput, match=r"worker 9, but the run has workers 0 to 3.*at least 10"):
        parse_latency("constant:1*slow:0=2,9=4").sampler(0, 4)


def test_a_change_holds_for_tickets_that_start_from_its_time_on() -> None:
    draw = parse_latency("constant:1->5->constant:2*slow:0=3->7->constant:4").sampler(0, 2)
    assert [draw(1, 0, 0, time_s) for time_s in (0.0, 4.99, 5.0, 6.0, 7.0, 100.0)] == [1, 1, 2, 2, 4, 4]
    assert draw(0, 0, 0, 5.0) == 6


def test_the_models_of_a_change_draw_as_they_do_alone() -> None:
    alone = parse_latency("shifted-exp:1,1").sampler(3, 4)
    changed = parse_latency("constant:1->5->shifted-exp:1,1").sampler(3, 4)
    assert [changed(2, step, 0, 6.0) for step in range(5)] == [alone(2, step, 0, 6.0) for step in range(5)]
