"""A cluster that runs already, as `ray start` makes it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quorate.engines.ray import security
from quorate.engines.ray.cluster import check_room
from quorate.engines.ray.connection import connect
from quorate.errors import BadInput
from tests.engines.ray.conftest import ONE_CPU
from tests.engines.ray.processes import descendants

pytestmark = pytest.mark.ray

TOKEN = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """A head as `ray start` makes it, on loopback, with a token; gives its address."""
    folder = tempfile.mkdtemp(prefix="quorate-head-", dir="/tmp")
    port = _free_port()
    variables = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += [f"--temp-dir={folder}", "--include-dashboard=false", "--num-cpus=2", "--object-store-memory=100000000"]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "block forever" in line:
            break
    else:
        pytest.fail("".join(said))
    yield f"127.0.0.1:{port}"
    below = descendants(process.pid)
    process.terminate()
    process.stdout.close()
    process.wait()
    for one in below:
        while Path(f"/proc/{one}").exists():
            time.sleep(0.05)
    shutil.rmtree(folder)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_cluster_that_runs_already_is_joined_and_left_running(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    security.forget_token()
    for _ in range(2):  # it is still there the second time
        opened = connect(address=head, workers=8, demand=ONE_CPU)
        try:
            assert opened._session is None
            assert [node.resources["CPU"] for node in opened.nodes()] == [2.0]
        finally:
            opened.close()
        import ray

        assert not ray.is_initialized()
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    security.forget_token()
    with pytest.raises(BadInput, match="asks for a token"):
        connect(address=head, workers=1, demand=ONE_CPU)


def test_a_node_that_is_drained_says_when_it_leaves(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a spot warning comes: through Ray's own command. Last in this file, since the node takes no more work."""
    import ray

    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    security.forget_token()
    opened = connect(address=head, workers=1, demand=ONE_CPU)
    try:
        assert opened.draining() == {}

        @ray.remote(num_cpus=0)
        class Busy:  # an idle node would leave at once
            def here(self) -> bool:
                return True

        busy = Busy.remote()
        assert ray.get(busy.here.remote())
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", head]
        command += ["--node-id", opened.driver_node, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "spot", "--deadline-remaining-seconds", "600"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert 0 < opened.draining()[opened.driver_node] <= 600
        with pytest.raises(BadInput, match="room for 0: 0 of 0 CPUs free on 0 nodes"):
            check_room(opened, ONE_CPU, 1, 1, 0.0, lambda: False)
    finally:
        opened.close()
        monkeypatch.undo()
        security.forget_token()
