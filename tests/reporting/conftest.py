"""A browser for the page, and fonts for the figures."""

from __future__ import annotations

from tests.browser import browser as browser
from tests.fonts import fonts_are_open as fonts_are_open
