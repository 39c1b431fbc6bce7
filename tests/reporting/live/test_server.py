"""Who may look: loopback, the right name, the right token, and only look."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import quorate
from quorate.reporting.live.server import Server
from quorate.reporting.live.watcher import Watcher

from .conftest import GrowingTrace, served
from .runs import begin, round_of


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture
def server(trace: GrowingTrace) -> Iterator[Server]:
    begin(trace)
    round_of(trace, 0)
    with served(trace.path) as running:
        yield running


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": f"127.0.0.1:{server.port}", **headers}.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def test_the_page_and_its_parts_are_there_for_who_has_the_token(server: Server) -> None:
    page = ask(server, f"/{server.token}/")
    assert page.status == 200
    for part in ("watch.js", "charts.js", "texts.js", "elements.js", "watch.css", "uPlot.js", "uPlot.css", "icon.svg"):
        assert part.encode() in page.body
        assert ask(server, f"/{server.token}/{part}").status == 200
    state = json.loads(ask(server, f"/{server.token}/state").body)
    assert state["state"]["updates"] == 1


def test_who_has_the_state_already_is_not_sent_it_again(server: Server) -> None:
    whole = ask(server, f"/{server.token}/state?seen=-1")
    number = json.loads(whole.body)["state_number"]
    again = json.loads(ask(server, f"/{server.token}/state?seen={number}").body)
    assert again["state_number"] == number
    assert "state" not in again


def test_without_the_token_everything_is_forbidden(server: Server) -> None:
    wrong = server.token[:-1] + ("A" if server.token[-1] != "A" else "B")
    for path in ("/", "/favicon.ico", "/state", f"/{wrong}/", f"/{wrong}/state", f"/{wrong}/watch.js", "/%ff/state"):
        answer = ask(server, path)
        assert answer.status == 403, path
        assert server.token.encode() not in answer.body


def test_tokens_are_long_and_never_the_same(trace: GrowingTrace) -> None:
    with Watcher(trace.path) as watcher, Server(watcher) as one, Server(watcher) as other:
        assert one.token != other.token
        assert min(len(one.token), len(other.token)) >= 32
        assert one.url == f"http://127.0.0.1:{one.port}/{one.token}/"


def test_another_name_is_refused_even_with_the_token(server: Server) -> None:
    names = ("evil.example", "localhost.evil.example", "0.0.0.0")
    for host in ("", "127.0.0.1", "127.0.0.1:1", *(f"{name}:{server.port}" for name in names)):
        answer = ask(server, f"/{server.token}/state", Host=host)
        assert answer.status in (400, 403), host
        assert b"updates" not in answer.body


def test_the_names_of_this_machine_are_let_in(server: Server) -> None:
    for name in ("localhost", "LOCALHOST", "[::1]"):
        assert ask(server, f"/{server.token}/state", Host=f"{name}:{server.port}").status == 200, name


def test_pages_of_other_origins_are_refused(server: Server) -> None:
    path = f"/{server.token}/state"
    assert ask(server, path, Origin="https://evil.example").status == 403
    assert ask(server, path, Origin="null").status == 403
    assert ask(server, path, Origin=f"http://127.0.0.1:{server.port}").status == 200


def test_there_is_nothing_to_do_but_look(server: Server) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"):
        answer = ask(server, f"/{server.token}/state", method)
        assert answer.status == 405, method
        assert answer.headers["allow"] == "GET"


def test_no_path_leads_out_of_the_page(server: Server) -> None:
    for path in ("../server.py", "%2e%2e/server.py", "/etc/passwd", "watch.js/", "..%2f..%2fassets%2fuPlot.LICENSE"):
        assert ask(server, f"/{server.token}/{path}").status == 404


def test_every_answer_carries_the_security_headers(server: Server) -> None:
    for answer in (
        ask(server, f"/{server.token}/"),
        ask(server, f"/{server.token}/nothing"),
        ask(server, "/"),
        ask(server, "/", Host="evil.example"),
        ask(server, "/", "POST"),
    ):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


def test_it_listens_on_loopback_alone_and_says_when_a_port_is_taken(server: Server, trace: GrowingTrace) -> None:
    assert server._socket.getsockname()[0] == "127.0.0.1"
    with (
        Watcher(trace.path) as watcher,
        pytest.raises(quorate.BadInput, match=f"port {server.port} cannot be used: Address already in use; leave"),
    ):
        Server(watcher, server.port)


def test_nonsense_sent_to_the_port_leaves_the_terminal_alone(
    server: Server, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = f"GET /{server.token}/state HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    for nonsense in (b"\x00\x01\r\n\r\n", upgrade.encode()):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(nonsense)
            assert connection.recv(100).startswith(b"HTTP/1.1 4")
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
