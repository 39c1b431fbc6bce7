"""The experiment's table and figure."""

from __future__ import annotations

from pathlib import Path

from experiments.common.drawing import COLOURS, figure_in, outer_legend
from experiments.common.spread import Spread, markdown, spread_of
from experiments.common.trials import Found
from experiments.lengths.settings import FULL_SYNC, GIVEN_BACK, GONE, LENGTHS, QUORUMS, OfLength, Training

_COLOURS = {FULL_SYNC: COLOURS["full-sync"], GIVEN_BACK: "#009E73", GONE: "#D55E00"}


def shares(found: Found[Training, OfLength], how: str, length: int) -> Spread:
    """Share of the used gradients that are of this length, over its share of the data; by seed."""
    values = []
    for trial, rows in found.items():
        if trial.how == how:
            used = {row.length: row.used for row in rows}
            values.append(used[length] / sum(used.values()) * len(LENGTHS))
    return spread_of(values)


def losses(found: Found[Training, OfLength], how: str, length: int) -> Spread:
    return spread_of(
        [row.loss for trial, rows in found.items() if trial.how == how for row in rows if row.length == length]
    )


def paces(found: Found[Training, OfLength], how: str) -> Spread:
    """Used gradients a second over full sync's, seed by seed."""
    pace = {(trial.how, trial.seed): sum(row.used for row in rows) / rows[0].seconds for trial, rows in found.items()}
    return spread_of([value / pace[FULL_SYNC, seed] for (one, seed), value in pace.items() if one == how])


def text(found: Found[Training, OfLength]) -> str:
    """Both tables."""
    head = ["late gradients", *(f"{length} characters" for length in LENGTHS)]
    rows = [[how, *(shares(found, how, length).text(3) for length in LENGTHS)] for how in QUORUMS]
    parts = ["# Lengths: tables\n", "Used gradients of a length over its share of the data\n", markdown(head, rows)]
    rows = [
        [how, *(losses(found, how, length).text(3) for length in LENGTHS), paces(found, how).text(2)] for how in QUORUMS
    ]
    head = ["late gradients", *(f"{length} characters" for length in LENGTHS), "gradients a second over full sync"]
    return "\n".join([*parts, "Test loss, nats a character\n", markdown(head, rows)])


def draw(file: Path, found: Found[Training, OfLength]) -> None:
    """Bars of what was used, by length."""
    with figure_in(file, 1, 2, 3.6) as (left, right):
        for axes, measure in ((left, shares), (right, losses)):
            for number, how in enumerate(QUORUMS):
                spreads = [measure(found, how, length) for length in LENGTHS]
                at = [place + 0.27 * (number - 1) for place in range(len(LENGTHS))]
                error = [0.0 if spread.half_width != spread.half_width else spread.half_width for spread in spreads]
                means = [spread.mean for spread in spreads]
                axes.bar(at, means, 0.25, yerr=error, color=_COLOURS[how], label=how, error_kw={"lw": 1})
            axes.set_xticks(range(len(LENGTHS)), [str(length) for length in LENGTHS])
            axes.set_xlabel("characters of a sequence")
        left.axhline(1.0, color="#777777", lw=0.8)
        left.set(title="share of the updates over share of the data")
        lowest = min(losses(found, how, length).mean for how in QUORUMS for length in LENGTHS)
        right.set(title="test loss, nats a character", ylim=(0.8 * lowest, None))
        outer_legend((left, right))
