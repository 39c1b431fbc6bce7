"""Fonts for the figures."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def fonts_are_open() -> None:
    """matplotlib keeps the fonts it has used open; let it do so before anybody counts open files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    figure.text(0, 0, "a λ")
    figure.canvas.draw()
