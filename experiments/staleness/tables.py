"""What the trainings came to: by method and staleness, beside what the paper has, as text."""

from __future__ import annotations

import math
from typing import NamedTuple

from experiments.common.curves import Point
from experiments.common.spread import Spread, markdown, spread_of
from experiments.common.trials import Found
from experiments.published import CHEN
from experiments.staleness.settings import (
    METHODS,
    PAPERS_EMA,
    TUNED,
    Length,
    Trial,
    final_error,
    trainings_of,
    tuning_of,
    with_papers_average,
)

#: Test error in per cent that Chen et al. (2016) have, read from their figure.
PAPER: dict[int, float] = {int(s): error for s, error in CHEN["fig2_mnist_error_pct_digitised"].items()}


class Outcome(NamedTuple):
    """What a method came to at one staleness: error over its seeds, as a share."""

    trial: Trial  # of its first seed
    error: Spread
    diverged: int


def outcomes(found: Found[Trial, Point], length: Length) -> dict[tuple[str, int], Outcome]:
    """By method and staleness, as far as there are any."""
    made = {}
    for method in METHODS:
        for staleness in length.stalenesses_of(method):
            outcome = _outcome(trainings_of(staleness, method, found, length) or [], found)
            if outcome is not None:
                made[method, staleness] = outcome
    return made


def _outcome(trials: list[Trial], found: Found[Trial, Point]) -> Outcome | None:
    there = [trial for trial in trials if trial in found]
    if not there:
        return None
    errors = [final_error(found[trial]) for trial in there]
    return Outcome(there[0], spread_of(errors), sum(found[trial][-1].diverged for trial in there))


def best_method(made: dict[tuple[str, int], Outcome], staleness: int) -> str | None:
    """That with the least mean error; None where there is none."""
    there = [method for method in METHODS if (method, staleness) in made]
    return min(there, key=lambda method: made[method, staleness].error.mean, default=None)


def summary(found: Found[Trial, Point], length: Length) -> str:
    """All tables, as Markdown."""
    made = outcomes(found, length)
    parts = [
        "Test error in per cent, mean ± half of the 95 % interval over seeds; where seeds fail, lowest to highest.\n",
        _by_staleness(made, length),
        "Repairs one by one, each with a number of its own where it has one.\n",
        _repairs(made, length),
        "The tuning: loss on held-out pictures after a short training, by learning rate or norm.\n",
        _tuning(found, length),
        _papers_average(found, length),
    ]
    return "\n".join(part for part in parts if part)


def _by_staleness(made: dict[tuple[str, int], Outcome], length: Length) -> str:
    rows = []
    for staleness in length.stalenesses:
        ramped = made.get(("ramp and rate", staleness))
        best = best_method(made, staleness)
        rows.append(
            [
                staleness,
                f"{PAPER[staleness]:.2f}" if staleness in PAPER else "–",
                cell(made.get(("none", staleness))),
                cell(ramped),
                "–" if ramped is None else f"{ramped.trial.lr:g}",
                "–" if best is None else f"{best}: {cell(made[best, staleness])}",
            ]
        )
    return markdown(["staleness", "paper", "no repair", "ramp and own rate", "that rate", "best of all"], rows)


def _repairs(made: dict[tuple[str, int], Outcome], length: Length) -> str:
    rows = []
    for method in METHODS:
        cells = []
        for staleness in length.repaired:
            outcome = made.get((method, staleness))
            number = ""
            if outcome is not None and method == "clip":
                number = f" (norm {outcome.trial.clip:g})"
            elif outcome is not None and "rate" in method:
                number = f" (rate {outcome.trial.lr:g})"
            cells.append(cell(outcome) + number)
        rows.append([method, *cells])
    return markdown(["", *(f"staleness {staleness}" for staleness in length.repaired)], rows)


def _tuning(found: Found[Trial, Point], length: Length) -> str:
    rows = []
    for method in TUNED:
        for staleness in length.stalenesses_of(method):
            trials, best = tuning_of(staleness, method, found, length)
            for trial in sorted((one for one in trials if one in found), key=lambda one: (one.lr, one.clip)):
                last = found[trial][-1]
                loss = "diverged" if last.diverged or math.isnan(last.loss) else f"{last.loss:.4f}"
                number = trial.clip if method == "clip" else trial.lr
                rows.append([method, staleness, f"{number:g}", loss, "chosen" if trial == best else ""])
    return markdown(["method", "staleness", "rate or norm", "loss", ""], rows)


def _papers_average(found: Found[Trial, Point], length: Length) -> str:
    plain = trainings_of(0, "none", found, length) or []
    ours, papers = _outcome(plain, found), _outcome(with_papers_average(plain), found)
    if ours is None or papers is None:
        return ""
    return (
        f"Without staleness, an average with decay {PAPERS_EMA:g} has an error of {cell(papers)} %, "
        f"one with {ours.trial.ema:g} has {cell(ours)} %.\n"
    )


def cell(outcome: Outcome | None) -> str:
    """Mean ± interval; lowest to highest where seeds fail, or differ so much that the interval has errors below 0."""
    if outcome is None:
        return "–"
    error, diverged = outcome.error, outcome.diverged
    if diverged == error.seeds:
        return f"diverged ({diverged} of {error.seeds})"
    if diverged or error.half_width > error.mean:
        shown = f"{100 * error.lowest:.2f} to {100 * error.highest:.2f}"
    else:
        shown = error.text(digits=2, scale=100.0)
    return shown + (f" ({diverged} of {error.seeds} diverged)" if diverged else "")
