"""python -m benchmarks.watch [--tickets N] [--json]: does `quorate watch` stay smooth on a run of a million tickets?

A trace of that size is made by the simulator; then a real `quorate watch` is opened in a headless Chromium, first on
the whole trace, then on one that grows by 100,000 lines a second. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tests.browser import find_browser

import quorate
from quorate.reporting.live.watcher import Watcher

LINES_PER_S = 100_000
GROW_S = 10.0

# How long each frame and each long task of the page takes, from when this is run.
WATCH_FRAMES = """() => {
  window.frames_ms = []; window.tasks_ms = [];
  let last = performance.now();
  const tick = (now) => { window.frames_ms.push(now - last); last = now; requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  new PerformanceObserver((list) => list.getEntries().forEach((one) => window.tasks_ms.push(one.duration)))
    .observe({ entryTypes: ["longtask"] });
}"""

# What it costs the page to show a whole snapshot once more, charts included.
REDRAW = """async () => {
  const took = [];
  for (let turn = 0; turn < 50; turn += 1) {
    const start = performance.now();
    showState(state);
    await Promise.resolve();
    took.push(performance.now() - start);
  }
  return took.sort((a, b) => a - b)[25];
}"""


def make_trace(folder: Path, tickets: int) -> tuple[Path, float]:
    """A simulated run of 96+4; gives its trace and the lines written in a CPU second."""
    start = time.process_time()
    quorate.train(
        None,
        quorate.BackupSync(96, 4),
        quorate.Simulated(100, "shifted-exp:0.05,0.025"),
        updates=tickets // 100,
        out=folder / "whole",
    )
    seconds = time.process_time() - start
    trace = folder / "whole" / "trace.jsonl"
    with trace.open("rb") as file:
        return trace, sum(1 for _ in file) / seconds


def reading(trace: Path) -> dict[str, Any]:
    """Records read in a CPU second, and the bytes of a snapshot on the way and at the end."""
    sizes = []
    start = time.process_time()
    with Watcher(trace) as watcher:
        published = watcher.published
        while published.content["status"] != "ended":
            published = watcher.wait(published.number, 60)
            sizes.append(len(published.body))
    seconds = time.process_time() - start
    return {
        "records": published.content["records"],
        "records_per_cpu_s": published.content["records"] / seconds,
        "snapshot_bytes": sizes[-1],
        "largest_snapshot_bytes": max(sizes),
        "quiet_answer_bytes": len(published.body_without_state),
    }


@contextmanager
def watched(run: Path) -> Iterator[tuple[str, int]]:
    """A real `quorate watch`: its address and its process number."""
    command = [sys.executable, "-m", "quorate", "watch", str(run), "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            url = next(line.strip() for line in process.stdout if line.startswith("http"))
            yield url, process.pid
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def grow(source: Path, target: Path) -> int:
    """Copy lines at the pace wanted; gives how many."""
    began, copied = time.monotonic(), 0
    with source.open("rb") as lines, target.open("ab", buffering=0) as out:
        while (elapsed := time.monotonic() - began) < GROW_S:
            wanted = int(elapsed * LINES_PER_S) - copied
            chunk = [line for _, line in zip(range(wanted), lines, strict=False)]
            out.write(b"".join(chunk))
            copied += len(chunk)
            if wanted and not chunk:
                break
            time.sleep(0.05)
    return copied


def in_browser(trace: Path, folder: Path) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {}
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=find_browser(), args=["--no-sandbox", "--disable-gpu"])
        with watched(trace) as (url, pid):
            page = chromium.new_page()
            page.add_init_script(f"({WATCH_FRAMES})()")
            opened = time.monotonic()
            page.goto(url)
            page.wait_for_selector("#tile-rate .value")
            found["first_numbers_s"] = time.monotonic() - opened
            page.wait_for_function(
                "() => document.querySelector('#status').textContent.startsWith('the run has ended')", timeout=300_000
            )
            found["all_read_s"] = time.monotonic() - opened
            found["while_reading"] = smoothness(page)
            found["redraw_ms"] = page.evaluate(REDRAW)
            page.close()
        growing = folder / "growing" / "trace.jsonl"
        growing.parent.mkdir()
        growing.touch()
        with watched(growing) as (url, pid):
            page = chromium.new_page()
            page.add_init_script(f"({WATCH_FRAMES})()")
            page.goto(url)
            began, before = time.monotonic(), cpu_seconds(pid)
            lines = grow(trace, growing)
            elapsed = time.monotonic() - began
            found["growing"] = {
                "lines_per_s": lines / elapsed,
                "cores_of_the_server": (cpu_seconds(pid) - before) / elapsed,
                **smoothness(page),
            }
            page.wait_for_function(
                "(records) => fetch('state').then((a) => a.json()).then((a) => a.records === records)",
                arg=lines,
                timeout=60_000,
            )
            found["growing"]["behind_s"] = time.monotonic() - began - elapsed
            page.close()
        chromium.close()
    return found


def smoothness(page: Any) -> dict[str, float]:
    frames, tasks = page.evaluate("() => [window.frames_ms, window.tasks_ms]")
    return {
        "frames": len(frames),
        "frame_ms_median": median(frames),
        "frames_over_50_ms": sum(one > 50 for one in frames),
        "frame_ms_longest": max(frames),
        "tasks_over_50_ms": len(tasks),
        "longest_task_ms": max(tasks, default=0.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tickets", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, written = make_trace(folder, arguments.tickets)
        small, _ = make_trace(folder / "small", 10_000)
        report: dict[str, Any] = {
            "tickets": arguments.tickets,
            "lines_written_per_cpu_s": written,
            "reading": reading(trace),
            "reading_10000_tickets": reading(small),
            "browser": in_browser(trace, folder),
        }
    report["read_over_written"] = report["reading"]["records_per_cpu_s"] / written
    print(json.dumps(report, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
