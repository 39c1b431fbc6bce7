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
    figure.text(0, 0, "a λ $10^{-1} x$")  # a logarithmic axis has fonts of its own
    figure.canvas.draw()


@pytest.fixture(scope="session", autouse=True)
def tracker_is_running() -> None:
    """Python starts one process of its own beside the first that is spawned, and keeps it to its end."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
