"""A run that ended in the middle of an epoch goes on to the same bits, with dropout and a new data loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data_parallel.launching import Launcher

pytestmark = pytest.mark.data_parallel

WORKERS = 2


def digests(launcher: Launcher, folder: Path, loading: int, end: str = "whole", version: int = -1) -> list[str]:
    """What the workers ended with; nothing where the run ended early."""
    launch = launcher.launch("mid_epoch.py", WORKERS, folder, str(folder), str(loading), end, str(version))
    assert launch.wait() == [0] * WORKERS, "\n".join(launch.text(worker) for worker in range(WORKERS))
    return [file.read_text() for file in sorted(folder.glob("digest*.txt"))]


@pytest.mark.parametrize("loading", [0, 2])
def test_a_run_that_ended_early_goes_on_to_the_same_bits(launcher: Launcher, tmp_path: Path, loading: int) -> None:
    """The new iterator of a data loader draws a seed, and evaluating draws some more: neither may be noticed."""
    (tmp_path / "whole").mkdir()
    whole = digests(launcher, tmp_path / "whole", loading)
    assert len(whole) == WORKERS and len(set(whole)) == 1
    for end, version in (("killed", 4), ("killed", 6), ("finished", 9), ("finished", 6)):
        folder = tmp_path / f"{end}{version}"
        folder.mkdir()
        assert digests(launcher, folder, loading, end, version) == []
        (folder / "store").unlink(missing_ok=True)
        assert digests(launcher, folder, loading) == whole, f"{end} at version {version}"
