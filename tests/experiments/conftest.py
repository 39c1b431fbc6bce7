"""Fonts for the figures, and the process that Python starts for others."""

from __future__ import annotations

import pytest

from tests.fonts import fonts_are_open as fonts_are_open


@pytest.fixture(scope="session", autouse=True)
def tracker_is_running() -> None:
    """Python starts one process of its own beside the first that is spawned, and keeps it to its end."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()
