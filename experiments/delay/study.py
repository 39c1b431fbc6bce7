"""The whole study, unattended: rates are tuned method by method, and what is chosen is trained with three seeds.

Trainings run side by side in processes. What is finished is on disk, and a second call goes on from there.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.delay.results import append_rows, final_accuracy, read_curves, setting_of
from experiments.delay.settings import DELAYS, METHODS, NETS, SEEDS, Length, Setting, further, tried
from experiments.delay.training import Row, train

MOST_TRIED = 6


class Study:
    """What is done and what is to be done next. It knows nothing of processes."""

    def __init__(
        self,
        *,
        methods: tuple[tuple[int, str], ...] = METHODS,
        seeds: tuple[int, ...] = SEEDS,
        most_tried: int = MOST_TRIED,
    ) -> None:
        self._seeds, self._most_tried = seeds, most_tried
        self._found: dict[Setting, float] = {}
        self._given: set[Setting] = set()
        self._tuned: dict[tuple[str, int, str], list[Setting]] = {}
        self._chosen: dict[tuple[str, int, str], Setting] = {}
        self._ready: list[Setting] = []
        for delay, repair in methods:
            for net in reversed(NETS):  # the larger first
                self._tuned[net, delay, repair] = tried(net, delay, repair)
                self._offer(self._tuned[net, delay, repair])

    def finished(self, setting: Setting, accuracy: float) -> None:
        """Take note of a result, and see what follows from it."""
        self._given.add(setting)
        self._ready = [other for other in self._ready if other != setting]
        self._found[setting] = accuracy
        if setting.tuning:
            self._go_on_tuning(setting.method)

    def next(self) -> Setting | None:
        """A training to begin; None while nothing is ready."""
        if not self._ready:
            return None
        setting = self._ready.pop(0)
        self._given.add(setting)
        return setting

    def _go_on_tuning(self, method: tuple[str, int, str]) -> None:
        settings = self._tuned.get(method, [])
        if method in self._chosen or not settings or any(setting not in self._found for setting in settings):
            return
        best = max(settings, key=self._found.__getitem__)
        more = further(settings, best, self._most_tried)
        if more is not None:
            settings.append(more)
            if more in self._found:
                self._go_on_tuning(method)
            else:
                self._offer([more], first=True)
            return
        self._chosen[method] = best
        delay = best.delay
        chosen = [replace(best, seed=seed) for seed in self._seeds]
        if delay == 0:  # nothing to repair: and its rate is what others have who repair nothing
            chosen = [replace(setting, repair="none", delay=other) for other in DELAYS for setting in chosen]
        self._offer(chosen, first=delay != 0)

    def _offer(self, settings: list[Setting], first: bool = False) -> None:
        fresh = [setting for setting in settings if setting not in self._given]
        self._ready = [*fresh, *self._ready] if first else [*self._ready, *fresh]


def run_study(
    folder: Path,
    lengths: Mapping[str, Length],
    *,
    data: Path | None,
    device: str,
    precision: str,
    processes: int,
    limit_s: float,
    study: Study,
) -> bool:
    """Run what is not yet in the folder; True when everything is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for rows in _trainings(read_curves(folder)):
        study.finished(setting_of(rows[-1]), final_accuracy(rows))
    until = time.monotonic() + limit_s
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context)
    running: dict[Future[list[Row]], Setting] = {}
    try:
        while True:
            while len(running) < processes and (setting := study.next()) is not None:
                job = partial(train, setting, lengths[setting.net], data, device, precision)
                running[pool.submit(job)] = setting
            if not running:
                return True
            left_s = None if limit_s == math.inf else max(0.0, until - time.monotonic())
            done, _ = wait(running, timeout=left_s, return_when=FIRST_COMPLETED)
            if not done:
                return False
            for future in done:
                setting, rows = running.pop(future), future.result()
                append_rows(folder, rows)
                study.finished(setting, final_accuracy(rows))
                print(
                    f"{setting.net} delay {setting.delay} {setting.repair} lr {setting.lr:g} seed {setting.seed}: "
                    f"{final_accuracy(rows):.4f}",
                    flush=True,
                )
    finally:
        _stop(pool)


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the trainings that are under way: what is not finished is not kept."""
    for process in list((pool._processes or {}).values()):
        process.terminate()
    pool.shutdown(cancel_futures=True)


def _trainings(rows: list[Row]) -> Iterator[list[Row]]:
    found: dict[Setting, list[Row]] = {}
    for row in rows:
        found.setdefault(setting_of(row), []).append(row)
    yield from found.values()
