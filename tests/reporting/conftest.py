"""A browser for the page, and fonts for the figures."""

from __future__ import annotations

import pytest

from tests.browser import browser

__all__ = ["browser"]


@pytest.fixture(scope="session", autouse=True)
def fonts_are_open() -> None:
    """matplotlib keeps the fonts it has used open; let it do so before anybody counts open files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0, 0, "–")
    FigureCanvasAgg(figure).draw()
