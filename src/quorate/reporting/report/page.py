"""The report page: one HTML file that contains its data, styles and scripts, and loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from quorate.errors import BadInput

#: Identifies a report, which may be overwritten without asking.
MARK = '<meta name="generator" content="quorate report">'
_SCRIPTS = (
    "uPlot.iife.min.js",
    "elements.js",
    *(f"report/{name}.js" for name in ("words", "charts", "timeline", "page")),
)
_STYLES = ("uPlot.min.css", "report/page.css")


def page_text(data: dict[str, Any]) -> str:
    """The whole page. Text from traces is data: it is never part of the markup or of a script.

    The content security policy only runs the script with this digest, so even text that escaped could not run.
    """
    script = "\n".join(map(_asset, _SCRIPTS))
    assert "</script" not in script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return _filled(
        _asset("report/page.html"),
        {
            "MARK": MARK,
            "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'",
            "TITLE": html.escape(f"{data['title']} · quorate report"),
            "STYLE": "\n".join(map(_asset, _STYLES)),
            "DATA": json_for_script(data),
            "SCRIPT": script,
        },
    )


def json_for_script(data: dict[str, Any]) -> str:
    """JSON for a script element: escaped so that no text in it can end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _filled(template: str, parts: dict[str, str]) -> str:
    """Fill in the template in one pass, so that placeholders in the parts are not replaced."""
    pieces = template.split("@@")
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (files("quorate.reporting") / "assets" / name).read_text(encoding="utf-8")


def check_free(file: Path, overwrite: bool) -> None:
    """Refuse to overwrite a file that is no report; called before the traces are read."""
    if file.is_dir():
        raise BadInput(f"out is {str(file)!r}, which is a folder; name a file, e.g. {str(file / 'report.html')!r}")
    if not file.parent.is_dir():
        raise BadInput(f"out is {str(file)!r}, but the folder {str(file.parent)!r} does not exist; make it first")
    if file.exists() and not overwrite and not _is_ours(file):
        raise BadInput(f"out is {str(file)!r}, which exists and is no report; name another file, or add --overwrite")


def _is_ours(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return MARK in opened.read(2000)
    except OSError:
        return False


def write_page(text: str, file: Path) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"report {str(file)!r} cannot be written: {error.strerror}; name another with --out") from error
