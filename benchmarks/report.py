"""How heavy the report of a long run is, and how long a browser takes to draw it: `python -m benchmarks.report`.

Makes traces of simulated runs without gradients, their reports, and opens each several times in a headless Chromium.
Time goes from the start of the navigation until all charts are drawn and painted (`reportReadyMs`).
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RUNS = {
    "backup 96+4": ["--workers", "96+4"],
    "async 100": ["--workers", "100", "--policy", "async"],
    "backup 9900+100": ["--workers", "9900+100"],
}
LATENCY = "lognormal:0.05,0.3*pauses:0.02,10*slow:3=3"
LIMIT_S, LIMIT_BYTES = 2.0, 5_000_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def updates_for(name: str, tickets: int) -> int:
    """How many updates make so many tickets."""
    return tickets if name.startswith("async") else -(-tickets // (10_000 if "9900" in name else 100))


def quorate(*arguments: str) -> float:
    """Run a command in a process of its own; its seconds of CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "quorate", *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def opened_s(page_file: Path, repeats: int) -> list[float]:
    """Seconds until the page is drawn, each time in a new profile."""
    from playwright.sync_api import sync_playwright

    program = next((path for path in map(shutil.which, BROWSERS) if path is not None), None)
    if program is None:
        sys.exit(f"there is no browser to measure with; install one of: {', '.join(BROWSERS)}")
    times = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for _ in range(repeats):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-ready]", timeout=60_000)
            times.append(page.evaluate("window.reportReadyMs") / 1000)
            context.close()
        browser.close()
    return times


def measure(name: str, tickets: int, repeats: int, folder: Path) -> dict[str, Any]:
    run, page = folder / "run", folder / "page.html"
    shutil.rmtree(run, ignore_errors=True)
    cluster = ["--latency", LATENCY, *RUNS[name], "--updates", str(updates_for(name, tickets))]
    quorate("simulate", "--no-gradients", "--quiet", "--out", str(run), *cluster)
    cpu_s = quorate("report", str(run), "--out", str(page))
    began = time.process_time()
    sum(1 for _ in map(json.loads, (run / "trace.jsonl").open(encoding="utf-8")))
    parsing_s = time.process_time() - began
    times = opened_s(page, repeats)
    return {
        "run": name,
        "tickets": tickets,
        "trace_bytes": (run / "trace.jsonl").stat().st_size,
        "page_bytes": page.stat().st_size,
        "opened_s": {"median": statistics.median(times), "longest": max(times), "repeats": repeats},
        "made_cpu_s": cpu_s,
        "made_over_parsing": cpu_s / parsing_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tickets", type=int, nargs="+", default=[100_000])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for tickets in options.tickets:
            for name in options.runs:
                results.append(measure(name, tickets, options.repeats, Path(folder)))
                if not options.json:
                    _show(results[-1])
    if options.json:
        print(json.dumps(results, indent=2))
    slow = [one for one in results if one["opened_s"]["median"] > LIMIT_S or one["page_bytes"] > LIMIT_BYTES]
    return 1 if slow else 0


def _show(result: dict[str, Any]) -> None:
    opened = result["opened_s"]
    print(
        f"{result['run']:16} {result['tickets']:>9,} tickets: page {result['page_bytes'] / 1e6:.2f} MB "
        f"(trace {result['trace_bytes'] / 1e6:.1f} MB), opens in {opened['median']:.2f} s, longest of "
        f"{opened['repeats']}: {opened['longest']:.2f} s; made in {result['made_over_parsing']:.1f} times "
        f"what parsing the trace's JSON takes"
    )


if __name__ == "__main__":
    sys.exit(main())
