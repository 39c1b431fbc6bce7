"""One Ray for the tests of a module, and what it may do to this process meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quorate.engines.ray.cluster import Cluster, Demand
from quorate.engines.ray.connection import connect
from tests.conftest import Belongings

ONE_CPU = Demand(1.0, 0.0, {})


@pytest.fixture(scope="session", autouse=True)
def ray_is_imported() -> None:
    """Ray sets a variable of its own when it is imported; let it do so before anybody looks."""
    import ray  # noqa: F401


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest, private_temporary_folder: None) -> Iterator[None]:
    """As everywhere, but Ray's client keeps sockets and its own log open in the process: not ours to close."""
    before = Belongings()
    yield
    left = Belongings().left_behind(before)
    files = left.pop("files or sockets", {})
    assert isinstance(files, dict)
    ours = {number: target for number, target in files.items() if not _of_rays_client(target)}
    if left or ours:
        pytest.fail(f"{request.node.name} left behind: {left} {ours}")


def _of_rays_client(target: str) -> bool:
    return target.startswith("socket:") or ("/session_" in target and "/logs/" in target)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Ray of our own with four CPUs, for every test of a module."""
    connected = connect(address=None, workers=4, demand=ONE_CPU)
    yield connected
    connected.close()
