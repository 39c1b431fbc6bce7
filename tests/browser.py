"""A real browser without a window, for the tests that look at pages.

`browser` is a fixture: import it in the `conftest.py` of a folder of tests that needs it. `open_page` gives a page
of it that fails the test if the page logs an error, and that remembers what it asked the network for.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}


def find_browser() -> str | None:
    """The Chromium of this machine; None if it has none."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium. It lives as long as a file of tests, since its event loop is in the way of others."""
    program = find_browser()
    if program is None:
        pytest.skip(f"there is no browser on this machine; install one of: {', '.join(NAMES)}")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright (dev extra) is not installed")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@contextmanager
def open_page(
    browser: Browser, url: str, size: dict[str, int] | None = None, dark: bool = False
) -> Iterator[tuple[Page, list[str]]]:
    """A page, and the addresses that it asked for beside its own; what it logs as an error fails the test."""
    wide = size or DESK
    context = browser.new_context(
        viewport={"width": wide["width"], "height": wide["height"]}, color_scheme="dark" if dark else "light"
    )
    try:
        page = context.new_page()
        errors: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: asked.append(request.url) if request.url != url else None)
        page.goto(url)
        yield page, asked
        assert errors == []
    finally:
        context.close()
