"""Tables of the pages of contest, language and PixelCNN: methods at rates that they share, or at half their own."""

from __future__ import annotations

from experiments.common.drawing import in_words
from experiments.common.spread import markdown
from experiments.contest import shared_results
from experiments.contest.settings import LATENCIES
from experiments.language import results as language
from experiments.language.settings import FULL as LANGUAGE
from experiments.pages.found import found
from experiments.pixelcnn import results as pixelcnn
from experiments.pixelcnn.settings import FULL as PIXELCNN


def contest_at_one_rate() -> str:
    rows = []
    for latency, model in LATENCIES.items():
        for place, gain in enumerate(shared_results.gains(found("contest/shared"), latency)):
            rows.append(["" if place else in_words(model), *shared_results.line(gain)])
    return markdown(["", *shared_results.HEAD], rows)


def language_backups() -> str:
    return language.table(LANGUAGE, found("language"))


def pixelcnn_slow() -> str:
    return pixelcnn.table(PIXELCNN, found("pixelcnn"))
