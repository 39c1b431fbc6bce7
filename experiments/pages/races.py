"""Tables of the pages of contest, language and PixelCNN: methods at rates that they share, or at half their own."""

from __future__ import annotations

from experiments.common.drawing import in_words
from experiments.common.spread import markdown
from experiments.contest import shared_results
from experiments.contest.settings import LATENCIES
from experiments.pages.found import found


def contest_at_one_rate() -> str:
    rows = []
    for latency, model in LATENCIES.items():
        for place, gain in enumerate(shared_results.gains(found("contest-shared"), latency)):
            rows.append(["" if place else in_words(model), *shared_results.line(gain)])
    return markdown(["", *shared_results.HEAD], rows)
