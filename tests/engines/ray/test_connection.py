"""Addresses that are no cluster, not ours, or not like us: each gets a sentence, and soon."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from quorate.engines.ray import connection
from quorate.engines.ray.connection import reach
from quorate.errors import BadInput


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANSWER_WITHIN_S", 0.2)
    monkeypatch.setattr(connection, "SAY_WITHIN_S", 1.5)


@contextlib.contextmanager
def listening(backlog: int = 5) -> Iterator[str]:
    """Somebody who listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "host:port", "host:99999", "host:0", "1.2.3.4"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(BadInput, match=r"must be host:port \(port 6379 as a rule\) or auto"):
        reach(address)


def test_rays_client_protocol_is_refused_with_what_to_do() -> None:
    with pytest.raises(BadInput, match=r"ray://head:10001'.*`ray job submit`, or start it on a node"):
        reach("ray://head:10001")


def test_the_dashboards_address_is_told_apart() -> None:
    with pytest.raises(BadInput, match="dashboard's; give the cluster's own as host:port"):
        reach("http://head:8265")


def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(BadInput, match=r"no machine named 'no-such-host\.invalid' is known here"):
        reach("no-such-host.invalid:6379")


def test_a_port_where_nobody_listens() -> None:
    with listening() as address:
        pass
    with pytest.raises(BadInput, match=rf"nothing answers at {address} \(Connection refused\)"):
        reach(address)


@pytest.mark.usefixtures("hurried")
def test_a_machine_that_does_not_answer_is_given_up_with_the_time_waited() -> None:
    with listening(backlog=0) as address, contextlib.ExitStack() as waiting:
        host, port = address.split(":")
        for _ in range(4):  # the queue of a listener who accepts nobody is soon full
            queued = waiting.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex((host, int(port)))
        with pytest.raises(BadInput, match=rf"nothing answered at {address} within 0.2 s"):
            reach(address)


@pytest.mark.usefixtures("hurried")
def test_a_silent_listener_is_not_ray() -> None:
    with listening() as address, pytest.raises(BadInput, match=f"something answers at {address}, but not as Ray does"):
        reach(address)


class _Page(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.usefixtures("hurried")
def test_a_web_server_is_not_ray() -> None:
    with HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, name="web")
        thread.start()
        try:
            with pytest.raises(BadInput, match=r"not as Ray does.*port 6379 as a rule, not the dashboard's 8265"):
                reach(f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


def said(**other: Any) -> dict[str, Any]:
    import ray

    here = {"address": "127.0.0.1", "socket": "/dev/null", "is_head": True}
    python = ".".join(map(str, sys.version_info[:3]))
    usual = {"takes_anyone": True, "ray": ray.__version__, "python": python, "dashboard": "", "nodes": [here]}
    return {**usual, **other}


def answering(monkeypatch: pytest.MonkeyPatch, **other: Any) -> None:
    monkeypatch.setattr(connection, "_probe", lambda address: said(**other))


def test_a_cluster_like_us_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, dashboard="127.0.0.1:8265")
    with listening() as address:
        found = reach(address)
    assert (found.address, found.nodes, found.on_loopback) == (address, ("127.0.0.1",), True)


@pytest.mark.parametrize("other", [{"ray": "2.1.0"}, {"python": "3.8.1"}])
def test_another_ray_or_python_is_named_with_ours(monkeypatch: pytest.MonkeyPatch, other: dict[str, str]) -> None:
    answering(monkeypatch, **other)
    there, here = said(**other), said()
    with listening() as address, pytest.raises(BadInput) as caught:
        reach(address)
    assert f"runs Ray {there['ray']} with Python {there['python']}" in str(caught.value)
    assert f"here are Ray {here['ray']} and Python {here['python']}" in str(caught.value)


def test_another_patch_of_python_is_fine_where_ray_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, python=f"{sys.version_info[0]}.{sys.version_info[1]}.999")
    with listening() as address:
        with pytest.raises(BadInput, match=r"\.999"):
            reach(address)
        monkeypatch.setenv("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "minor")
        assert reach(address).address == address


ELSEWHERE = {"address": "8.8.8.8", "socket": "/dev/null", "is_head": True}
IN_A_CONTAINER = {"address": "127.0.0.1", "socket": "/no/such/socket", "is_head": True}


@pytest.mark.parametrize("nodes", [[], [ELSEWHERE], [IN_A_CONTAINER, ELSEWHERE]])
def test_this_machine_must_be_a_node(monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]]) -> None:
    answering(monkeypatch, nodes=nodes)
    with listening() as address, pytest.raises(BadInput, match=r"this machine is not a node.*`ray job submit`"):
        reach(address)


def test_no_ray_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    def nothing(*_: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(services, "canonicalize_bootstrap_address", nothing)
    with pytest.raises(BadInput, match="no Ray runs on this machine; start one with `ray start --head`"):
        reach("auto")
