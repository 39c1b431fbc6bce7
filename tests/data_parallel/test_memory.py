"""What a model leaves behind when it is dropped: nothing, and without the garbage collector, as with DDP."""

from __future__ import annotations

import json

import pytest

from tests.data_parallel.launching import Launcher
from tests.data_parallel.scripts.memory import POLICIES, STYLES

pytestmark = pytest.mark.data_parallel

Left = list[dict[str, tuple[float, bool]]]


@pytest.fixture(scope="module")
def left(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """By process and case: how much memory stayed, in units of the parameters, and whether one of these did."""
    folder = tmp_path_factory.mktemp("memory")
    launch = launcher.launch("memory.py", 2, folder, str(folder))
    assert launch.wait(110) == [0, 0], "\n".join(launch.text(worker) for worker in range(2))
    return [json.loads((folder / f"{worker}.json").read_text()) for worker in range(2)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policy", ["ddp", *POLICIES])
def test_nothing_is_left_of_a_model_that_is_dropped(left: Left, policy: str, style: str) -> None:
    for seen in left:
        if policy == "ddp" and style not in STYLES[:2]:
            continue
        share, is_there = seen[f"{policy}, {style}"]
        assert not is_there
        assert share < 0.3, "of the parameters' bytes"
