"""The page in a real browser: the right numbers for a known trace, and new ones as it grows."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quorate.metrics import metrics_of
from tests.browser import PHONE, open_page

from .conftest import GrowingTrace, served
from .runs import begin, end, full_round, round_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ORDER = ("findings", "tiles", "workers", "charts")


def shows(page: Page, selector: str, text: str) -> None:
    """Wait until an element says this."""
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.textContent.replaceAll('\\u00a0', ' ') === text",
        arg=[selector, text],
    )


def test_the_page_shows_the_numbers_of_a_known_trace_and_follows_it(browser: Browser, trace: GrowingTrace) -> None:
    with served(trace.path.parent) as server, open_page(browser, server.url) as (page, asked):
        shows(page, "#status", f"waiting for {trace.path}, which is not there yet")
        assert page.locator("#view").is_hidden()
        begin(trace)
        for version in range(4):
            round_of(trace, version, loss=4.0 - version)
        shows(page, "#tile-loss .value", "1.00")
        shows(page, "#title", "backup 2+1 on digits")
        shows(page, "#subtitle", "3 workers (local) · seed 7 · real seconds")
        shows(page, "#tile-rate .value", "1.00")
        shows(page, "#tile-pace .value", "1.00 s")
        shows(page, "#tile-dropped .value", "33.3 %")
        shows(page, "#tile-dropped .more", "4 dropped, 8 applied, 0 lost")
        shows(page, "#tile-bytes .value", "20.0 kB")
        shows(page, "#tile-bytes .more", "80.0 % used")
        shows(page, "#tile-samples .value", "32")
        shows(page, "#tile-measure-0 .name", "accuracy")
        shows(page, "#tile-measure-0 .value", "0.530")
        shows(page, "#reasons tbody", "late: its version is over4100.0 %")
        shows(page, "#legend span:nth-child(3)", "1 late: its last ticket was dropped")
        assert page.evaluate("document.querySelector('#bar-done').style.width") == "40%"
        assert "4 of 10 updates" in page.inner_text("#progress-text")
        assert [cell.get_attribute("class") for cell in page.locator("#strip div").all()] == [
            "waiting",
            "waiting",
            "late",
        ]
        for chart in ("loss", "measure-0", "pace", "kth", "staleness"):
            assert page.locator(f"#chart-{chart} canvas").count() == 1
        assert page.locator("#choices-part").is_hidden()

        round_of(trace, 4, loss=0.5)
        trace.chose(5.0, 5, 3, "two arrive together")
        shows(page, "#tile-loss .value", "0.500")
        shows(page, "#tile-samples .value", "40")
        shows(page, "#choices tbody", "53two arrive together")
        trace.lost(5.5, 1, ())
        shows(page, "#legend span:nth-child(4)", "1 lost")
        end(trace, 5, at=6.0)
        shows(page, "#status", "the run has ended: limit reached")
        assert all(address.startswith(server.url) for address in asked)


def test_the_page_opens_with_who_is_slow_and_workers_stand_before_curves(browser: Browser, trace: GrowingTrace) -> None:
    begin(trace, policy={"name": "full-sync"})
    for version in range(5):
        full_round(trace, version, {0: 1.0, 1: 1.0, 2: 2.2})
    with served(trace.path.parent) as server, open_page(browser, server.url) as (page, _):
        shows(
            page,
            "#findings .slow p",
            "Worker 2 is ×2.2 slow in computing: 2.20 s a gradient, the usual worker takes 1.00 s. Waiting for it "
            "costs 6.00 s, 55% of the last 5 updates. Without it, an update takes 1.00 s instead of 2.20 s, with 2 of "
            "3 gradients: ×1.47 the samples per second. Look for other load on its machine, or leave it out.",
        )
        shows(page, "#findings .command", f"quorate plan {trace.path.parent} --what-if without=2")
        assert page.locator("#workers tbody tr").first.get_attribute("class") == "slow"
        assert page.locator("#workers tr.slow").count() == 1
        tops = [page.locator(f"#{name}").evaluate("(one) => one.getBoundingClientRect().top") for name in ORDER]
        assert tops == sorted(tops)
        for version in range(5, 60):
            full_round(trace, version, {0: 1.0, 1: 1.0, 2: 1.0})
        page.wait_for_selector("#findings .even")
        assert page.locator("#findings .slow, #workers tr.slow").count() == 0
        assert page.locator("#findings .plan").count() == 0, "of a run that goes on nothing is planned"
        end(trace, 60, at=200.0)
        page.wait_for_selector("#findings .plan")
        assert page.inner_text("#findings .plan p").startswith("Take ")


def test_after_an_interrupt_the_page_shows_the_command_to_go_on(browser: Browser, trace: GrowingTrace) -> None:
    begin(trace)
    round_of(trace, 0)
    folder = trace.path.parent
    with served(folder) as server, open_page(browser, server.url) as (page, _):
        shows(page, "#status", "running")
        assert page.locator("#go-on").is_hidden()
        trace.ended(1.0, 1, "stopped by SIGINT", None)
        shows(page, "#status", "the run has ended: stopped by SIGINT")
        assert page.locator("#go-on").is_hidden(), "there is nothing to go on from"
        (folder / "checkpoints" / "00000001").mkdir(parents=True)
        page.wait_for_selector("#go-on:not([hidden])")
        assert page.inner_text("#go-on code") == f"quorate train --resume {folder}"


def test_a_resumed_run_is_shown_from_its_checkpoint_on(browser: Browser, trace: GrowingTrace) -> None:
    begin(trace)
    round_of(trace, 0)
    checkpoint = trace.path.stat().st_size
    round_of(trace, 1, loss=9.0)
    with served(trace.path) as server, open_page(browser, server.url) as (page, _):
        shows(page, "#tile-loss .value", "9.00")
        with trace.path.open("r+b") as file:
            file.truncate(checkpoint)
        trace.resumed(1.0, 1, {"updates": 4, "epochs": None, "until": None})
        shows(page, "#tile-loss .value", "1.00")
        page.wait_for_function(
            "() => document.querySelector('#progress-text').textContent.includes('1 of 4 updates') && "
            "document.querySelector('#progress-text').textContent.includes('resumed at update 1')"
        )


def test_a_page_whose_server_is_gone_says_so_and_finds_it_again(browser: Browser, trace: GrowingTrace) -> None:
    """The connection is cut in the browser, since a server that is really gone logs an error in the page."""
    begin(trace)
    round_of(trace, 0)
    with served(trace.path) as server, open_page(browser, server.url) as (page, _):
        shows(page, "#tile-loss .value", "1.00")
        page.evaluate("window.kept = fetch; window.fetch = () => Promise.reject(new TypeError('gone')); true")
        page.wait_for_selector("#server-gone:not([hidden])")
        assert "does not answer" in page.inner_text("#server-gone")
        assert page.inner_text("#tile-loss .value") == "1.00", "the last numbers stay"
        round_of(trace, 1, loss=0.25)
        page.evaluate("window.fetch = window.kept; true")
        shows(page, "#tile-loss .value", "0.250")
        assert page.locator("#server-gone").is_hidden()


def test_text_of_a_trace_is_never_markup(browser: Browser, trace: GrowingTrace) -> None:
    evil = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"`${1}'
    begin(trace, task=evil, policy={"name": evil}, engine={"name": evil, "latency": evil}, until=evil)
    round_of(trace, 0)
    trace.evaluated(1.0, 1, {evil: 1.0})
    trace.chose(1.0, 1, 2, evil)
    trace.ended(1.0, 1, evil, None)
    with served(trace.path) as server, open_page(browser, server.url) as (page, asked):
        page.wait_for_selector("#view:not([hidden])")
        shows(page, "#status", f"the run has ended: {evil}")
        assert evil in page.inner_text("#title")
        assert evil in page.inner_text("#choices")
        assert page.locator("#charts h2", has_text="<img").count() == 1
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        assert all(address.startswith(server.url) for address in asked)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(browser: Browser, trace: GrowingTrace, dark: bool) -> None:
    begin(trace)
    round_of(trace, 0)
    with served(trace.path) as server, open_page(browser, server.url, PHONE, dark) as (page, _):
        shows(page, "#tile-loss .value", "1.00")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) < 3 * 64) == dark


def test_a_real_run_is_watched_from_before_its_start_to_its_end(browser: Browser, tmp_path: Path) -> None:
    """It is ended by Ctrl-C once it was seen to run, so that neither has to be quick enough for the other."""
    run = tmp_path / "run"
    with served(run) as server, open_page(browser, server.url) as (page, _):
        page.wait_for_function("() => document.querySelector('#status').textContent.startsWith('waiting for')")
        command = ["train", "--task", "digits", "--workers", "1+1", "--updates", "100000", "--latency", "constant:0.02"]
        with subprocess.Popen(
            [sys.executable, "-m", "quorate", *command, "--out", str(run)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            page.wait_for_function("() => document.querySelector('#status').textContent === 'running'", timeout=60_000)
            page.wait_for_function("() => document.querySelector('#tile-samples .value')?.textContent > '0'")
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=90)
        assert process.returncode == 130, err
        page.wait_for_function("() => document.querySelector('#status').textContent.startsWith('the run has ended: ')")
        page.wait_for_selector("#go-on:not([hidden])")
        assert page.inner_text("#go-on code") == f"quorate train --resume {run}"
        metrics = metrics_of(run)
        assert metrics.updates > 0
        shows(page, "#tile-samples .value", f"{metrics.samples_applied:,}")
        shows(page, "#tile-loss .value", f"{metrics.last_loss:#.3g}")
