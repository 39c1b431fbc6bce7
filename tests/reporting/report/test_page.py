"""The page in a real browser: the right numbers, no request, no error, and no text that turns into markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quorate.reporting.report.data import report_data
from quorate.reporting.report.exports import json_for_script, page_text
from quorate.reporting.report.trace_pass import gather
from tests.browser import DESK, PHONE, open_page
from tests.reporting.report.test_data import PLAN
from tests.reporting.traces import BACKUP, END, HEADER, asynchronous, rounds_of, write

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"


def page_of(tmp_path: Path, *folders: Path, plan: dict[str, Any] | None = None) -> str:
    file = tmp_path / "page.html"
    file.write_text(page_text(report_data([gather(folder) for folder in folders], plan=plan)), encoding="utf-8")
    return file.as_uri()


def ready(page: Page) -> None:
    page.wait_for_selector("html[data-ready]")


def figure(page: Page, name: str) -> str:
    return page.locator(f'dd[data-figure="{name}"]').first.inner_text()


def test_numbers_of_a_known_trace(tmp_path: Path, browser: Browser) -> None:
    with open_page(browser, page_of(tmp_path, write(tmp_path / "run", BACKUP))) as (page, asked):
        ready(page)
        assert page.locator("h1").inner_text() == "backup 2+1"
        assert figure(page, "updates").split("\n") == ["3", "in 8 s"]
        assert figure(page, "accuracy").startswith("0.75")
        assert figure(page, "last loss") == "1"
        assert figure(page, "lost").startswith("1")
        assert "data used up" in page.locator("article").inner_text()
        assert page.locator("[data-drops]").inner_text() == "Dropped: 2 × late: its version is over."
        assert page.locator("[data-bytes]").inner_text() == "1.5 kB sent, 1.2 kB used, 300 B wasted (20 %)"
        slow = page.locator('tr[data-worker="2"] td').all_inner_texts()
        assert slow[1:3] == ["×1.50", "computing"]
        assert page.locator("tr[data-worker]").first.get_attribute("data-worker") == "2"
        assert page.locator(".uplot").count() == 4  # accuracy, loss, distribution and mean of arrivals
        assert asked == []


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_page_opens_with_findings_and_nothing_is_cut_off(
    tmp_path: Path, browser: Browser, size: dict[str, int]
) -> None:
    """Numbers as long as they get: the tables of a run that records everything fit a desk, and scroll on a phone."""
    records = rounds_of({worker: 1.0 if worker != 3 else 2.2 for worker in range(8)})
    records = [{**one, "time": one["time"] * 123.4567} if "time" in one else one for one in records]
    url = page_of(tmp_path, write(tmp_path / "run", records), plan=PLAN)
    with open_page(browser, url, size) as (page, _):
        ready(page)
        found = page.locator("#findings > div")
        assert [found.nth(place).get_attribute("data-finding") for place in range(2)] == ["slow", "plan"]
        assert found.nth(0).inner_text().startswith("Worker 3 is ×2.2 slow in")
        assert found.nth(0).locator("code").inner_text().startswith("quorate plan ")
        assert "--workers 3+1" in found.nth(1).locator("code").inner_text()
        box, card = found.nth(0).bounding_box(), page.locator("article").bounding_box()
        assert box is not None and card is not None
        assert box["y"] < 250 and box["y"] < card["y"]
        ground = "(row) => getComputedStyle(row.cells[0]).backgroundColor"
        colours = {
            row.get_attribute("data-worker"): row.evaluate(ground) for row in page.locator("tr[data-worker]").all()
        }
        assert colours["3"] != colours["0"] and len({colours[str(other)] for other in (0, 1, 2, 4, 5, 6, 7)}) == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
        if size is DESK:
            cut = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth).length"
            assert page.locator(".scroll").count() == 1 and page.evaluate(cut) == 0


def test_when_nobody_is_slow_the_page_says_so_first(tmp_path: Path, browser: Browser) -> None:
    url = page_of(tmp_path, write(tmp_path / "run", rounds_of({0: 1.0, 1: 1.0, 2: 1.0})))
    with open_page(browser, url) as (page, _):
        ready(page)
        assert page.locator("#findings > div").first.inner_text().startswith("No worker is slow")
        assert page.locator("tr.slow").count() == 0


def test_a_tie_can_be_seen_on_the_choosing_chart(tmp_path: Path, browser: Browser) -> None:
    """Splits from ×1 to ×20: one per cent is several pixels high, and every curve has its band."""
    splits = [
        {
            **{"quorum": 8 - backups, "backups": backups, "updates": 1.0, "wasted": 0.1, "bytes": 5, "time": mean},
            "update_seconds": {"mean": mean, "low": 0.99 * mean, "high": 1.01 * mean, "median": mean, "p99": mean},
        }
        for backups, mean in enumerate((20.0, 1.2, 1.01, 1.0, 1.005, 1.1, 2.0, 9.0))
    ]
    choice = {**PLAN["recommendation"], "quorum": 5, "backups": 3}
    plan = {"machines": 8, "splits": splits, "recommendation": choice}
    url = page_of(tmp_path, write(tmp_path / "run", BACKUP), plan=plan)
    with open_page(browser, url) as (page, _):
        ready(page)
        plots = "[...CHARTS].filter((one) => one.plot && one.holder.closest('#plan')).map((one) => one.plot)"
        assert page.evaluate(f"{plots}.map((plot) => plot.bands.length)") == [1, 1]
        apart = f"{plots}.map((plot) => plot.valToPos(1.0, 'y') - plot.valToPos(1.01, 'y'))[0]"
        assert page.evaluate(apart) > 5
        assert "as good as 5+3" in page.locator("#plan").inner_text()


def test_splits_that_cannot_be_judged_are_not_drawn(tmp_path: Path, browser: Browser) -> None:
    """Workers shared cores: the plan leaves out other splits' figures, so the page has no chart of them."""
    plan = {**PLAN, "recommendation": {**PLAN["recommendation"], "is_kept": True}}
    with open_page(browser, page_of(tmp_path, write(tmp_path / "run", BACKUP), plan=plan)) as (page, _):
        ready(page)
        assert page.locator("#plan .uplot").count() == 0
        assert "Figures of other splits are left out" in page.locator("#plan").inner_text()


def test_heat_map_says_what_a_cell_is(tmp_path: Path, browser: Browser) -> None:
    url = page_of(tmp_path, write(tmp_path / "run", rounds_of({0: 1.0, 1: 1.0, 2: 2.0})))
    with open_page(browser, url) as (page, _):
        ready(page)
        canvas = page.locator(".heat canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        wide = (box["width"] - 52) / 10
        page.mouse.move(box["x"] + 46 + 4.5 * wide, box["y"] + 18 * 2 + 8)
        says = page.locator(".heat + .says").inner_text()
        assert says.startswith("worker 2, update 4: ") and says.endswith("×2.00")


def test_x_axis_can_be_switched(tmp_path: Path, browser: Browser) -> None:
    with open_page(browser, page_of(tmp_path, write(tmp_path / "run", BACKUP))) as (page, _):
        ready(page)
        axes = "[...CHARTS].filter((one) => one.plot && one.holder.closest('#learning')).map((one) => one.plot.data[0])"
        assert page.evaluate(axes) == [[2, 4, 7]] * 2
        page.get_by_label("updates", exact=True).check()
        assert page.evaluate(axes) == [[1, 2, 3]] * 2
        page.get_by_label("samples", exact=True).check()
        assert page.evaluate(axes) == [[20, 40, 60]] * 2


def test_timeline_zooms_and_pans_and_says_what_it_shows(tmp_path: Path, browser: Browser) -> None:
    with open_page(browser, page_of(tmp_path, write(tmp_path / "run", BACKUP))) as (page, _):
        ready(page)
        canvas = page.locator("#timeline canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        left, width = box["x"] + 46, box["width"] - 52

        def view() -> tuple[float, float]:
            return float(canvas.get_attribute("data-from") or "nan"), float(canvas.get_attribute("data-to") or "nan")

        def at(seconds: float) -> float:
            return left + width * seconds / 8

        assert view() == (0.0, 8.0)
        says = page.locator("#timeline .says")
        for worker, seconds, words in (
            (1, 3.0, "cancelled"),
            (1, 4.25, "lost"),
            (1, 6.0, "no worker"),
            (0, 1.5, "waiting"),
            (2, 5.0, "computed, used, 3 s from 4.00 s"),
        ):
            page.mouse.move(at(seconds), box["y"] + 18 * worker + 8)
            assert words in says.inner_text()
        page.mouse.move(at(2), box["y"] + 20)
        page.mouse.down()
        page.mouse.move(at(3), box["y"] + 22)
        page.mouse.move(at(4), box["y"] + 22)
        page.mouse.up()
        assert view() == pytest.approx((2.0, 4.0), abs=0.02)
        page.get_by_role("button", name="→").click()
        assert view() == pytest.approx((3.0, 5.0), abs=0.02)
        page.get_by_role("button", name="whole run").click()
        assert view() == (0.0, 8.0)
        canvas.focus()
        page.keyboard.press("+")
        assert view() == (2.0, 6.0)


def test_text_of_a_trace_stays_text(tmp_path: Path, browser: Browser) -> None:
    hostile = [json.loads(json.dumps(record).replace("late: its version is over", "late @@")) for record in BACKUP]
    hostile[0] = {**HEADER, "task": HOSTILE, "engine": {**HEADER["engine"], "latency": HOSTILE}}
    for record in hostile:
        if "reason" in record:
            record["reason"] = HOSTILE
        if record["event"] == "evaluate":
            record["measures"] = {HOSTILE: 0.5, "__proto__": 1.0}
    choice = {"event": "choose", "time": 0.0, "version": 0, "quorum": 2, "reason": HOSTILE}
    folder = write(tmp_path / "run", [*hostile[:4], choice, *hostile[4:]])
    plan = {**PLAN, "recommendation": {**PLAN["recommendation"], "reason": HOSTILE}}
    text = page_text(report_data([gather(folder)], plan=plan))
    assert HOSTILE not in text and "<img" not in text
    with open_page(browser, page_of(tmp_path, folder, plan=plan)) as (page, asked):
        ready(page)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img").count() == 0
        assert HOSTILE in page.locator("article").inner_text()
        assert asked == []


def test_json_in_a_script_is_still_the_same_json() -> None:
    value = {"text": "</script><!-- & \u2028 é"}
    text = json_for_script(value)
    assert "<" not in text and json.loads(text) == value


def test_nothing_but_our_script_may_run(tmp_path: Path, browser: Browser) -> None:
    file = tmp_path / "page.html"
    text = page_text(report_data([gather(write(tmp_path / "run", BACKUP))]))
    file.write_text(text.replace("</body>", "<script>window.hacked=1</script></body>"), encoding="utf-8")
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(file.as_uri())
        ready(page)
        assert page.evaluate("window.hacked") is None
    finally:
        context.close()


def test_runs_without_gradients_or_rounds_have_no_empty_charts(tmp_path: Path, browser: Browser) -> None:
    with open_page(browser, page_of(tmp_path, write(tmp_path / "run", asynchronous()))) as (page, _):
        ready(page)
        assert page.locator(".uplot").count() == 0
        assert "Gradients were not computed" in page.locator('[data-absent="learning"]').inner_text()
        assert "no rounds" in page.locator('[data-absent="arrivals"]').inner_text()
        assert page.locator("#staleness svg rect").count() == 2


def test_runs_side_by_side(tmp_path: Path, browser: Browser) -> None:
    torn = BACKUP[:-1]
    folders = [
        write(tmp_path / "one", BACKUP),
        write(tmp_path / "two", torn),
        write(tmp_path / "three", asynchronous()),
    ]
    with open_page(browser, page_of(tmp_path, *folders, plan=PLAN), PHONE, dark=True) as (page, _):
        ready(page)
        rows = page.locator("#comparison tbody tr").all_inner_texts()
        assert [row.split("\t")[0].strip() for row in rows] == ["backup 2+1 (one)", "backup 2+1 (two)", "async 2"]
        swatches = page.locator("#comparison .swatch")
        drawn = [swatches.nth(place).evaluate("(one) => one.style.borderTopColor") for place in range(3)]
        assert len(set(drawn)) == 3
        assert all(swatch.evaluate("(one) => one.offsetWidth") == 22 for swatch in page.locator(".swatch").all())
        assert "broke off" in page.locator("article").nth(1).inner_text()
        assert page.locator("article .notice").count() == 1
        assert page.locator("[data-choice]").get_attribute("data-choice") == "3+1"
        assert "since the last gradient <b>costs</b> most" in page.locator("#plan").inner_text()
        assert page.locator("#plan .uplot").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_header_alone_gives_a_short_page(tmp_path: Path, browser: Browser) -> None:
    with open_page(browser, page_of(tmp_path, write(tmp_path / "run", [HEADER, {**END, "version": 0}]))) as (page, _):
        ready(page)
        assert page.locator("h2").count() == 0
        assert "holds no update" in page.locator("article").inner_text()
