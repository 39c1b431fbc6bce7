"""The screenshots of docs/: the report and the live page, 1280 and 400 pixels wide, of runs made anew.

python -m tests.pictures docs/pictures
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from quorate.cli import main
from tests.browser import find_browser
from tests.reporting.live.conftest import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIDTHS = {1280: 1500, 400: 1700}  # and how much of the page is shown
TIMES = "shifted-exp:0.05,0.01"


def make_pictures(folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    program = find_browser()
    if program is None:
        sys.exit("there is no Chromium on this machine; install one, e.g. apt install chromium")
    with tempfile.TemporaryDirectory() as place, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        os.chdir(place)  # the pages show paths as they are typed
        runs = Path("runs")
        for name, number, latency in (("slow", "001", f"{TIMES}*slow:3=2.2"), ("even", "002", TIMES)):
            run = runs / number
            ran = main(["simulate", "--workers", "8", "--latency", latency, "--epochs", "20", "-q", "--out", str(run)])
            assert ran == 0 and main(["report", str(run)]) == 0
            take(browser, (run / "report.html").resolve().as_uri(), folder / f"report-{name}", "html[data-ready]")
        assert main(["report", str(step_times(Path("times.csv")))]) == 0
        take(browser, Path("times.html").resolve().as_uri(), folder / "report-times", "html[data-ready]")
        live(browser, runs / "003", folder)
        browser.close()


def take(browser: Browser, url: str, name: Path, ready: str) -> None:
    for width, height in WIDTHS.items():
        context = browser.new_context(viewport={"width": width, "height": height})
        page = context.new_page()
        page.goto(url)
        page.wait_for_selector(ready)
        page.wait_for_timeout(500)  # what moves comes to rest
        page.screenshot(path=f"{name}-{width}.png")
        context.close()


def live(browser: Browser, run: Path, folder: Path) -> None:
    """A run of real processes whose worker 3 is slow: while it goes on, and after Ctrl-C."""
    delay = "constant:0.05*slow:3=2.2"
    command = ["train", "--task", "digits", "--workers", "4", "--latency", delay, "--epochs", "500", "--out", str(run)]
    with (
        subprocess.Popen([sys.executable, "-m", "quorate", *command], stderr=subprocess.DEVNULL) as process,
        served(run) as server,
    ):
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_function(
            "() => document.querySelector('#progress-text').textContent.match(/ (1[0-9][0-9]) of /)", timeout=300_000
        )
        take(browser, server.url, folder / "watch-running", "#findings .slow")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=120)
        page.wait_for_selector("#findings .plan", timeout=120_000)
        context.close()
        take(browser, server.url, folder / "watch-interrupted", "#go-on:not([hidden])")


def step_times(file: Path) -> Path:
    """As quorate.measure writes them: eight processes, process 5 slow in its backward pass, some batches late."""
    draw = random.Random(7)
    lines = ["step,worker,seconds,data,forward,backward,optimizer,waiting"]
    for step in range(400):
        rows = []
        for worker in range(8):
            data = 0.002 + draw.expovariate(1000) + (0.06 if draw.random() < 0.02 else 0.0)
            forward, backward = 0.02 * draw.uniform(0.95, 1.05), 0.04 * draw.uniform(0.95, 1.05)
            rows.append([data, forward, backward * (2.4 if worker == 5 else 1.0), 0.003])
        last = max(map(sum, rows))
        for worker, parts in enumerate(rows):
            cells = (sum(parts), *parts, last - sum(parts) + 0.004)
            lines.append(",".join([f"{step},{worker}", *(f"{cell:.6f}" for cell in cells)]))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


if __name__ == "__main__":
    make_pictures(Path(sys.argv[1]))
