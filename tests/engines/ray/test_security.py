"""Who can reach a cluster, and when to say so."""

from __future__ import annotations

import os
import socket
import warnings

import pytest

from quorate.engines.ray import security
from quorate.engines.ray.security import Listener, is_here, is_loopback, listeners, public_addresses, warn_if_open

NOT_PUBLIC = ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.1.1", "100.64.0.1"]
NOT_PUBLIC += ["::1", "fd00::1", "fe80::1"]


@pytest.mark.parametrize("host", NOT_PUBLIC)
def test_private_addresses_are_not_public(host: str) -> None:
    assert public_addresses([host]) == []


@pytest.mark.parametrize("host", ["8.8.8.8", "172.32.0.1", "100.128.0.1", "2001:4860:4860::8888", "::ffff:8.8.8.8"])
def test_what_the_internet_routes_to_is_public(host: str) -> None:
    assert public_addresses([host]) == [host]


def test_a_name_is_as_public_as_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, 0, 0, "", ("8.8.4.4", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert public_addresses(["cluster.example"]) == ["cluster.example"]


def test_a_name_that_nobody_knows_is_nowhere() -> None:
    assert public_addresses(["no-such-host.invalid"]) == []
    assert not is_loopback("no-such-host.invalid")
    assert not is_here("no-such-host.invalid")


def test_an_open_cluster_at_a_public_address_is_warned_of_once() -> None:
    places = {"10.0.0.1": "the Ray cluster", "8.8.8.8": "a node of the Ray cluster", "8.8.4.4": "the Ray dashboard"}
    with pytest.warns(RuntimeWarning, match=r"a node of the Ray cluster is at 8\.8\.8\.8, a public address") as caught:
        warn_if_open(places, takes_anyone=True)
    assert len(caught) == 1
    assert "RAY_AUTH_MODE=token" in str(caught[0].message)


def test_no_warning_behind_a_token_or_on_a_private_network() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_open({"8.8.8.8": "the Ray cluster"}, takes_anyone=False)
        warn_if_open({"10.0.0.1": "the Ray cluster"}, takes_anyone=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_what_listens_here_is_seen_where_it_listens(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        assert Listener(host, server.getsockname()[1]) in listeners()


def test_a_cluster_here_that_listens_everywhere_is_at_every_address_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "own_public_addresses", lambda: ["8.8.8.8"])
    with socket.create_server(("0.0.0.0", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as loopback:
        open_one = f"127.0.0.1:{everywhere.getsockname()[1]}"
        closed_one = f"127.0.0.1:{loopback.getsockname()[1]}"
        assert "8.8.8.8" in security.reachable_places(open_one, ["127.0.0.1"], "127.0.0.1:8265")
        assert list(security.reachable_places(closed_one, ["127.0.0.1"], "127.0.0.1:8265")) == ["127.0.0.1"]


def test_nodes_and_dashboard_are_places_too() -> None:
    places = security.reachable_places("10.0.0.1:6379", ["10.0.0.2"], "[2001:db8::1]:8265")
    assert list(places) == ["10.0.0.1", "10.0.0.2", "2001:db8::1"]


def test_only_addresses_of_this_machine_are_here() -> None:
    assert is_here("127.0.0.1")
    assert not is_here("8.8.8.8")


def test_a_fresh_token_is_gone_from_the_environment_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/somewhere")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    tokens = set()
    for _ in range(2):
        with security.fresh_token():
            assert os.environ["RAY_AUTH_MODE"] == "token"
            assert "RAY_AUTH_TOKEN_PATH" not in os.environ
            tokens.add(os.environ["RAY_AUTH_TOKEN"])
        assert "RAY_AUTH_TOKEN" not in os.environ
        assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN_PATH"]) == ("disabled", "/somewhere")
    security.forget_token()
    assert len(tokens) == 2 and min(len(token) for token in tokens) >= 32
