"""python -m benchmarks.peers.figure: seconds to the target of every contender, from the committed run."""

from __future__ import annotations

from pathlib import Path

from experiments.common.drawing import figure_in, outer_legend, ticks

from benchmarks.peers.problem import TARGET
from benchmarks.peers.tables import rows

FIGURE = Path(__file__).parent / "figure.png"
_WORLDS = {
    "a": ("nobody straggles", "#7F7F7F"),
    "b": ("mild: 50 ms + Exp(25 ms)", "#0072B2"),
    "c": ("heavy: 50 ms, 1 in 25 takes 500 ms", "#D55E00"),
}


def draw(file: Path = FIGURE) -> None:
    order = sorted(rows("c"), key=lambda row: (row.seconds is None, row.seconds or 0.0), reverse=True)
    place = {row.name: number for number, row in enumerate(order)}
    with figure_in(file, height=5.6) as axes:
        for case, (world, colour) in _WORLDS.items():
            found = [(row.seconds, place[row.name]) for row in rows(case) if row.seconds and row.name in place]
            axes.plot(*zip(*found, strict=True), "o", color=colour, label=world, markersize=7)
        axes.set_xscale("log")
        ticks(axes, "x", (0.2, 0.5, 1, 2, 5, 10, 20))
        axes.set_yticks(range(len(order)), [row.label for row in order])
        for label, row in zip(axes.get_yticklabels(), order, strict=True):
            label.set_fontweight("bold" if row.label.startswith("quorate") else "normal")
        axes.grid(axis="y", alpha=0.25)
        axes.set_xlabel(f"seconds to {100 * TARGET:.0f} % accuracy on digits; further left is better")
        outer_legend([axes], columns=3)


if __name__ == "__main__":
    draw()
