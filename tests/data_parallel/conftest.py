"""One launcher for all tests of real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.data_parallel.launching import Launcher

WORKERS = 3


@pytest.fixture(scope="package")
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    made.close()


class Quorums(NamedTuple):
    """What scripts/quorums.py left: traces by case, and by case what each worker saw."""

    folder: Path
    seen: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="package")
def quorums(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Quorums:
    folder = tmp_path_factory.mktemp("quorums")
    launch = launcher.launch("quorums.py", WORKERS, folder, str(folder))
    assert launch.wait(110) == [0] * WORKERS, "\n".join(launch.text(worker) for worker in range(WORKERS))
    by_worker = [json.loads((folder / f"seen{worker}.json").read_text()) for worker in range(WORKERS)]
    return Quorums(folder, {case: [seen[case] for seen in by_worker] for case in by_worker[0]})
