"""Fonts for tests that draw. Import `fonts_are_open` in the `conftest.py` of a folder of tests that needs it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def fonts_are_open() -> None:
    """matplotlib keeps the fonts it has used open; let it do so before anybody counts open files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    figure.text(0, 0, "a – λ $10^{-1} x$")  # a logarithmic axis has fonts of its own
    FigureCanvasAgg(figure).draw()
