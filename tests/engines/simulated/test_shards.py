"""A network with several servers: one queue that stands for all gives what a queue for each would."""

from __future__ import annotations

from typing import Any

import pytest

import quorate
from quorate.events import Parts, Ticket
from quorate.network import Network, parse_network
from quorate.trace import Update

POLICIES = [
    quorate.FullSync(),
    quorate.BackupSync(6, 2),
    quorate.BackupSync(6, 2, late="finish"),
    quorate.KBatchSync(9),
    quorate.Async(),
    quorate.BoundedStaleness(2),
]
NETWORKS = ["server=20MB/s", "bandwidth=7MB/s,server=13MB/s,latency=0.3ms", "bandwidth=3MB/s,server=200MB/s"]


class OneServer(quorate.Simulated):
    """The arithmetic from before there were shards, letter for letter."""

    def _transfer_out(self, now: float) -> float:
        network, size = self.network, self.parameter_bytes()
        assert network is not None
        self._out_free_at = max(self._out_free_at, now) + size / network.server_bandwidth
        return max(self._out_free_at, now + size / network.bandwidth) + network.latency_s

    def _transfer_in(self, now: float) -> float:
        network, size = self.network, self.parameter_bytes()
        assert network is not None
        self._in_free_at = max(self._in_free_at, now) + size / network.server_bandwidth
        return max(self._in_free_at, now + size / network.bandwidth) + network.latency_s


class ManyServers(quorate.Simulated):
    """A link for each shard, each with its own queue: a transfer is over when its last piece is."""

    def open(self, job: Any) -> None:
        super().open(job)
        assert self.network is not None
        self._outs, self._ins = [0.0] * self.network.shards, [0.0] * self.network.shards

    def _piece_by_piece(self, free_at: list[float], now: float) -> float:
        network = self.network
        assert network is not None
        size = self.parameter_bytes()
        for shard, free in enumerate(free_at):
            free_at[shard] = max(free, now) + (size / network.shards) / network.server_bandwidth
        return max(*free_at, now + size / network.bandwidth) + network.latency_s

    def _transfer_out(self, now: float) -> float:
        return self._piece_by_piece(self._outs, now)

    def _transfer_in(self, now: float) -> float:
        return self._piece_by_piece(self._ins, now)


class Happenings(quorate.Recorder):
    """What happened, and when."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.what: list[tuple[str, object]] = []

    def _note(self, time: float, kind: str, what: object) -> None:
        self.times.append(time)
        self.what.append((kind, what))

    def started(self, time: float, ticket: Ticket) -> None:
        self._note(time, "start", ticket)

    def arrived(self, time: float, ticket: Ticket, parts: Parts | None) -> None:
        self._note(time, "arrive", ticket)

    def applied(self, time: float, update: Update) -> None:
        self._note(time, "apply", update.version)

    def dropped(self, time: float, ticket: Ticket, reason: str) -> None:
        self._note(time, "drop", ticket)

    def cancelled(self, time: float, ticket: Ticket, reason: str) -> None:
        self._note(time, "cancel", ticket)


def happenings(kind: type[quorate.Simulated], policy: quorate.Policy, network: str, faults: str | None) -> Happenings:
    found = Happenings()
    engine = kind(8, "lognormal:0.3,0.8", network=network, model_bytes=1_234_567, faults=faults)
    quorate.train(None, policy, engine, updates=80, recorders=(found,))
    return found


@pytest.mark.parametrize("faults", [None, "crash:20,2"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_one_server_is_what_it_was_bit_for_bit(policy: quorate.Policy, network: str, faults: str | None) -> None:
    for text in (network, f"{network},shards=1"):
        now, before = (happenings(kind, policy, text, faults) for kind in (quorate.Simulated, OneServer))
        assert now.what == before.what and now.times == before.times


@pytest.mark.parametrize("faults", [None, "crash:20,2"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_one_queue_stands_for_those_of_all_shards(policy: quorate.Policy, network: str, faults: str | None) -> None:
    for shards in (3, 8):
        text = f"{network},shards={shards}"
        one, many = (happenings(kind, policy, text, faults) for kind in (quorate.Simulated, ManyServers))
        assert one.what == many.what and one.times == many.times


def test_shards_take_the_queue_off_the_server_but_nothing_off_a_workers_link() -> None:
    def mean(network: str) -> float:
        engine = quorate.Simulated(4, "constant:1", network=network, model_bytes=1_000_000)
        return float(quorate.train(None, quorate.FullSync(), engine, updates=10).summary["update_seconds"]["mean"])

    # Four versions of 50 ms, one after the other, and a gradient; in two shards each takes 25 ms.
    assert mean("server=20MB/s") == pytest.approx(1 + 4 * 0.05 + 0.05)
    assert mean("server=20MB/s,shards=2") == pytest.approx(1 + 4 * 0.025 + 0.025)
    # The worker's link carries the whole version, and the whole gradient.
    assert mean("bandwidth=20MB/s,server=20MB/s,shards=400") == pytest.approx(1 + 2 * 0.05)


def test_the_text_form_has_shards_only_where_there_are_several() -> None:
    several = parse_network("server=10Gbps, shards=8")
    assert several.shards == 8 and parse_network(several.text()) == several
    assert parse_network("server=10Gbps,shards=1").text() == "bandwidth=infB/s,latency=0ms,server=1250000000B/s"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("server=1Gbps,shards=0", "shards is 0, but it must be at least 1"),
        ("server=1Gbps,shards=-2", "'-2' is not a number of shards; write e.g. shards=8"),
        ("server=1Gbps,shards=1.5", "'1.5' is not a number of shards"),
        ("server=1Gbps,shards=many", "'many' is not a number of shards"),
        ("server=1Gbps,shards=", "'' is not a number of shards"),
        ("server=1Gbps,shards=²", "'²' is not a number of shards"),
        ("bandwidth=1Gbps,shards=8", "shards is 8, which changes nothing while servers' links have no limit; give"),
        ("server=1Gbps,shard=8", "'shard=8' is not understood; write e.g. bandwidth=1Gbps"),
    ],
)
def test_wrong_shards_are_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(quorate.BadInput, match=says):
        parse_network(text)


@pytest.mark.parametrize("shards", [0, -1, 2.0, True, "8"])
def test_a_network_of_code_is_checked_too(shards: Any) -> None:
    with pytest.raises(quorate.BadInput, match="at least 1"):
        Network(server_bandwidth=1e9, shards=shards)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        *(
            (form, 1e9)
            for form in ("1Gbps", "1Gbit", "1Gbit/s", "1 Gbit", "1Gbits/s", "1Gb/s", "1Gb", "1gbps", "1gbit")
        ),
        *((form, 1e10) for form in ("10GbE", "10gbe", "10GigE", "10 GbE", "10e9bps", "10000Mbit")),
        *((form, 1e9) for form in ("125MB/s", "125MBps", "0.125GB/s", "125000KB/s", "125e6B/s")),
        ("1MiB/s", 8 * 2**20),
        ("inf", float("inf")),
    ],
)
def test_forms_of_a_rate(text: str, bits: float) -> None:
    """A small b is a bit and a large B a byte, as everywhere; case decides nothing else."""
    assert parse_network(f"bandwidth={text}").bandwidth == pytest.approx(bits / 8)
