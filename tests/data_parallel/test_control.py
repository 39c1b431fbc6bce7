"""The control plane with real sockets and real processes: who is heard, who is turned away, who is missed."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import FileStore, HashStore, Store

from quorate import BackupSync
from quorate.data_parallel.control import Hub, Link, addresses, wire
from quorate.data_parallel.control import hub as hub_module
from quorate.data_parallel.control.hub import RELAYED
from quorate.data_parallel.control.wire import NoMessage, Unpacker, pack
from quorate.data_parallel.coordinator_thread import CoordinatorThread
from quorate.errors import BadInput, ProcessLost, QuorateError
from quorate.ledger import Ledger

pytestmark = pytest.mark.data_parallel

LONG_S = 30.0  # what a test waits for that is there at once


class Heard:
    """What one process hears over its link."""

    def __init__(self, worker: int, store: Store, patience_s: float = 60.0) -> None:
        self.messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.failures: SimpleQueue[QuorateError] = SimpleQueue()
        self.link = Link(worker, store, self.messages.put, self.failures.put, patience_s, arrival_s=LONG_S)

    def message(self) -> dict[str, Any]:
        return self.messages.get(timeout=LONG_S)

    def failure(self) -> str:
        return str(self.failures.get(timeout=LONG_S))

    def finish(self) -> None:
        self.link.send("finished")
        self.link.close()
        assert self.failures.empty()


@contextmanager
def gathered(
    workers: int, here: int | None = None, store: Store | None = None, patience_s: float = 60.0
) -> Iterator[tuple[Hub, list[Heard]]]:
    """A hub, and the links of the first workers, all in this process."""
    store = store or HashStore()
    with ExitStack() as to_close:
        hub = Hub(workers, patience_s=patience_s)
        to_close.callback(hub.close, 0.0)
        hub.publish(store)
        links = []
        for worker in range(workers if here is None else here):
            links.append(Heard(worker, store, patience_s))
            to_close.callback(links[-1].link.close)
        yield hub, links


@contextmanager
def process(role: str, path: Path, workers: int, worker: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.data_parallel.control_process", role, str(path), str(workers), str(worker)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


# ---------------------------------------------------------------- what is said


def test_a_message_gets_to_the_hub_and_another_back() -> None:
    with gathered(2) as (hub, links):
        links[1].link.send("arrived", version=3, compute_s=0.5)
        received, worker, message = hub.inbox.get(timeout=LONG_S)
        assert (worker, message) == (1, {"kind": "arrived", "version": 3, "compute_s": 0.5})
        assert received <= monotonic()
        hub.tell(0, {"kind": "lent", "batch": 7})
        hub.broadcast({"kind": "go", "version": 4})
        assert [links[0].message(), links[0].message()] == [{"kind": "lent", "batch": 7}, {"kind": "go", "version": 4}]
        assert links[1].message() == {"kind": "go", "version": 4}


def test_what_is_said_to_a_worker_before_it_comes_is_kept_for_it() -> None:
    store = HashStore()
    with gathered(2, here=1, store=store) as (hub, _):
        hub.broadcast({"kind": "go", "version": 1})
        late = Heard(1, store)
        assert late.message() == {"kind": "go", "version": 1}
        late.link.close()


def test_more_than_the_system_takes_at_once_arrives_whole_and_in_order() -> None:
    with gathered(1) as (hub, (link,)):
        texts = ["x" * 500_000 + str(number) for number in range(20)]
        for text in texts:
            hub.tell(0, {"kind": "go", "text": text})
            link.link.send("record", text=text)
        assert [link.message()["text"] for _ in texts] == texts
        assert [hub.inbox.get(timeout=LONG_S)[2]["text"] for _ in texts] == texts


@pytest.mark.parametrize("kind", RELAYED)
def test_what_a_process_says_to_all_comes_with_its_number(kind: str) -> None:
    with gathered(3) as (hub, links):
        links[1].link.send(kind, round=4)
        assert [link.message() for link in links] == [{"kind": kind, "round": 4, "worker": 1}] * 3
        assert hub.inbox.empty()


def test_sixty_four_links_speak_at_once() -> None:
    with gathered(64) as (hub, links):
        threads = [threading.Thread(target=link.link.send, args=("want",)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {hub.inbox.get(timeout=LONG_S)[1] for _ in links} == set(range(64))
        hub.broadcast({"kind": "over", "reason": "enough"})
        assert {link.message()["reason"] for link in links} == {"enough"}
        for link in links:
            link.finish()
        hub.close()
        assert all(link.failures.empty() for link in links)


def test_all_end_in_any_order_without_an_error_anywhere() -> None:
    store = HashStore()
    hub = Hub(3)
    hub.publish(store)
    links = [Heard(worker, store) for worker in range(3)]
    links[2].finish()
    for link in links[:2]:
        link.link.send("finished")
    hub.close()  # before the links of those: they have finished, so they need not be asked
    for link in links[:2]:
        link.link.close()
    assert [hub.inbox.get()[2]["kind"] for _ in range(hub.inbox.qsize())] == ["finished"] * 3  # and no loss
    assert all(link.failures.empty() for link in links)


# ---------------------------------------------------------------- who is missed


def test_a_killed_process_is_missed_by_everybody_else(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), -1)
    with gathered(3, here=2, store=store) as (hub, links), process("link", tmp_path / "store", 3, 2) as child:
        child.kill()
        _, worker, message = hub.inbox.get(timeout=LONG_S)
        assert (worker, message["kind"]) == (2, "lost")
        for link in links:
            why = link.failure()
            assert why.startswith(f"worker 2 (pid {child.pid} on {socket.gethostname()}) died")
            assert "checkpoint" in why
        links[0].link.close()
        assert links[0].failures.empty()  # told once


def test_killed_worker_0_is_missed_by_everybody(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), -1)
    with process("hub", tmp_path / "store", 3, 0) as child:
        links = [Heard(worker, store) for worker in (1, 2)]
        child.kill()
        for link in links:
            assert link.failure().startswith(f"worker 0 (pid {child.pid} on ")
            link.link.send("arrived", version=1)  # nobody hears it, and nothing happens
            link.link.close()


def test_a_process_that_finished_and_left_is_not_missed(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), -1)
    with gathered(2, here=1, store=store) as (hub, links), process("link", tmp_path / "store", 2, 1) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(LONG_S) == 0
        assert hub.inbox.get(timeout=LONG_S)[1:] == (1, {"kind": "finished"})
        links[0].finish()
    assert hub.inbox.get(timeout=LONG_S)[1:] == (0, {"kind": "finished"})
    assert hub.inbox.empty()


def test_a_process_that_dies_after_it_finished_is_missed() -> None:
    """It takes part in the others' updates until the run is over for all."""
    with gathered(2) as (_, links):
        links[1].link.send("finished")
        links[1].link._connection.sock.shutdown(socket.SHUT_RDWR)
        assert "died" in links[0].failure()


@pytest.mark.parametrize("slow", ["_gone", "_disconnect"])
def test_worker_0_that_aborts_and_closes_its_hub_at_once_is_missed(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """On a busy machine its main thread may close the hub before the hub's thread has dealt with its lost link."""
    real = getattr(Hub, slow)

    def slowly(hub: Hub, *given: Any) -> None:
        if slow == "_gone":
            sleep(0.3)
        real(hub, *given)
        sleep(0.3)

    monkeypatch.setattr(Hub, slow, slowly)
    monkeypatch.setattr("quorate.data_parallel.control.link._CLOSE_S", 0.1)
    with gathered(3) as (hub, links):
        links[0].link.close()
        hub.close()
        for link in links[1:]:
            assert link.failure().startswith(f"worker 0 (pid {os.getpid()} on {socket.gethostname()}) died")


def test_a_stopped_process_is_missed_after_the_patience(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), -1)
    links_patience_s = 1.5
    with (
        gathered(2, here=1, store=store, patience_s=links_patience_s) as (_, links),
        process("link", tmp_path / "store", 2, 1) as child,
    ):
        child.send_signal(signal.SIGSTOP)
        assert f"worker 1 (pid {child.pid} on {socket.gethostname()}) has been silent for 1.5 s" in links[0].failure()


def test_a_stopped_worker_0_is_missed_after_the_patience(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), -1)
    with process("hub", tmp_path / "store", 2, 0) as child:
        link = Heard(1, store, patience_s=1.5)
        child.send_signal(signal.SIGSTOP)
        assert f"worker 0 (pid {child.pid} on {socket.gethostname()}) has been silent for 1.5 s" in link.failure()
        link.link.close()


def test_a_process_that_never_comes_is_missed() -> None:
    hub = Hub(2, arrival_s=0.1)
    store = HashStore()
    hub.publish(store)
    link = Heard(0, store)
    assert link.failure().startswith("worker 1 has not connected to worker 0 within 0.1 s")
    link.link.close()
    hub.close(0.0)


def test_a_forked_child_does_not_keep_the_connection_of_its_dead_parent(tmp_path: Path) -> None:
    """As the processes of a data loader would."""
    code = (
        "import os, sys, time; from torch.distributed import FileStore; "
        "from quorate.data_parallel.control import Link; "
        "link = Link(1, FileStore(sys.argv[1], -1), print, print); "
        "child = os.fork()\n"
        "if child: print(child, flush=True)\n"
        "time.sleep(60)"
    )
    store = FileStore(str(tmp_path / "store"), -1)
    with gathered(2, here=1, store=store) as (_, links):
        command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "store")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            parent.kill()
            try:
                assert "died" in links[0].failure()
            finally:
                os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------- who is turned away


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def turned_away(hub: Hub, data: bytes) -> bool:
    """Whether a stranger who says this finds the connection closed."""
    with socket.create_connection(("127.0.0.1", hub._address.port), timeout=LONG_S) as stranger:
        stranger.sendall(data)
        try:
            return stranger.recv(100) == b""
        except ConnectionResetError:
            return True


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 5) + b"no js",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 5000) + b"{",
        pack({"kind": "hello", "worker": 2, "pid": 1, "host": "h", "token": "guessed"}),
        pack({"kind": "hello", "worker": 2, "pid": 1, "host": "h"}),
        pack({"kind": "arrived", "version": 1}),
        b"\xff" * 8,
        framed(b'{"kind":"hello","worker":2,"token":"\\ud800"}'),
        framed(b'{"kind":"hello","worker":2,"token":"\xc3\xa9"}'),
        framed(b'{"kind":"\\udfff"}'),
        framed(b'{"kind":"hello","worker":' + b"9" * 3000 + b',"token":"t"}'),
        framed(b'{"kind":"hello","worker":' + b"[" * 3000 + b"}"),
        framed('{"kind":"hello"}'.encode("utf-16")),
    ],
)
def test_strangers_are_turned_away_and_nobody_notices(said: bytes) -> None:
    with gathered(3, here=2) as (hub, links):  # worker 2's place is free
        assert turned_away(hub, said)
        links[1].link.send("want")
        assert hub.inbox.get(timeout=LONG_S)[1:] == (1, {"kind": "want"})
        assert all(link.failures.empty() for link in links)


#: Any text, half surrogate pairs included.
TEXTS = st.text(st.characters(exclude_categories=[]), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(["hello", "bye", "beat", "lost", "over", "made", "end", *RELAYED, *hub_module._HEARD]) | TEXTS
NAMES = st.sampled_from(["worker", "token", "pid", "host", "version", "round", "hyper", "total", "ask", "epoch", "why"])
MESSAGES = st.builds(
    lambda kind, fields: {**fields, "kind": kind}, KINDS, st.dictionaries(NAMES | TEXTS, VALUES, max_size=5)
)
FRAMES = MESSAGES.map(lambda one: framed(json.dumps(one).encode()))  # with half surrogate pairs, as `pack` never has
NOISE = (
    st.binary(max_size=60)
    | st.binary(max_size=60).map(framed)
    | VALUES.map(lambda one: framed(json.dumps(one).encode()))
)


def test_the_run_goes_on_whatever_strangers_send_to_a_living_hub() -> None:
    with gathered(3, here=2) as (hub, links):
        numbers = count()

        @settings(max_examples=300)
        @given(st.lists(FRAMES | NOISE, max_size=3))
        def send(said: list[bytes]) -> None:
            with socket.create_connection(("127.0.0.1", hub._address.port), timeout=LONG_S) as stranger:
                with suppress(ConnectionError):
                    for one in said:
                        stranger.sendall(one)
                number = next(numbers)
                links[1].link.send("want", ask=number)
                assert hub.inbox.get(timeout=LONG_S)[1:] == (1, {"kind": "want", "ask": number})
                links[0].link.send("entering", round=number)
                assert links[1].message() == {"kind": "entering", "round": number, "worker": 0}
            assert all(link.failures.empty() for link in links)

        send()
        store = HashStore()
        hub.publish(store)
        Heard(2, store).link.close()  # its place is still free


class HubAndCoordinator:
    """Worker 0 behaves, worker 1 is the test's own socket; the coordinator's policy needs one of the two."""

    def __init__(self, to_close: ExitStack) -> None:
        store = HashStore()
        self.hub = Hub(2)
        to_close.callback(self.hub.close, 0.0)
        self.hub.publish(store)
        self.honest = Heard(0, store)
        to_close.callback(self.honest.link.close)
        self.other = to_close.enter_context(socket.create_connection(("127.0.0.1", self.hub._address.port), LONG_S))
        self.other.sendall(
            pack({"kind": "hello", "worker": 1, "pid": 1, "host": "h", "token": self.hub._address.token})
        )
        assert self.other.recv(4) == framed(b'{"kind":"welcome"}')[:4]
        self.coordinator = CoordinatorThread(BackupSync(1, 1), 2, self.hub, decides=True, ledger=Ledger(None, 1))
        to_close.callback(self.coordinator.close, 0.0)
        self.coordinator.start()

    def goes_on_or_says_why(self) -> None:
        """Worker 0 brings a gradient: there is a version, or the reason why there is none."""
        self.honest.link.send("arrived", version=0)
        end = monotonic() + LONG_S
        while monotonic() < end:
            with suppress(Empty):
                if self.honest.messages.get(timeout=0.01)["kind"] in ("go", "over"):
                    return
            with suppress(Empty):
                why = str(self.honest.failures.get_nowait())
                assert "worker 1" in why, why
                return
        raise AssertionError("neither a version nor a reason")


@settings(max_examples=60)
@given(st.lists(FRAMES, min_size=1, max_size=3))
def test_a_worker_that_sends_anything_at_all_ends_the_run_with_a_reason_or_not_at_all(said: list[bytes]) -> None:
    with ExitStack() as to_close:
        world = HubAndCoordinator(to_close)
        with suppress(ConnectionError):
            for one in said:
                world.other.sendall(one)
        world.goes_on_or_says_why()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"kind": "arrived"}, "worker 1 sent a arrived message that is not understood (KeyError: 'version')"),
        (
            {"kind": "arrived", "version": "1"},
            "version, round, total, epoch, ask, steps are whole numbers, but it said",
        ),
        ({"kind": "end", "why": "I say so"}, "nobody knows the kind 'end'"),
        ({"kind": "want", "total": 1, "much": 2}, "worker 1 sent a want message that is not understood"),
    ],
    ids=str,
)
def test_what_a_worker_says_that_makes_no_sense_ends_the_run_with_the_reason(said: dict[str, Any], reason: str) -> None:
    with ExitStack() as to_close:
        world = HubAndCoordinator(to_close)
        world.other.sendall(pack(said))
        assert reason in world.honest.failure()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_crash_of_the_hubs_thread_is_no_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    with gathered(2) as (hub, links):

        def breaks(now: float) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(hub, "_look_for_silence", breaks)
        links[1].link.send("want")
        for link in links:
            assert link.failure().startswith("worker 0's control thread failed (ZeroDivisionError: a bug)")
        while hub.inbox.get(timeout=LONG_S)[2]["kind"] != "lost":  # the coordinator hears of it, too
            pass


def test_a_text_that_cannot_be_encoded_arrives_with_question_marks() -> None:
    with gathered(2) as (_, links):
        links[0].link.send("digest", digest="a \udc80 b")
        assert links[1].message()["digest"] == "a ? b"


def test_a_place_is_taken_once() -> None:
    store = HashStore()
    with gathered(2, store=store), pytest.raises(ProcessLost, match="turned worker 1 away: its place is taken"):
        Heard(1, store)


def test_a_worker_that_sends_garbage_is_lost_with_the_reason() -> None:
    with gathered(2) as (_, links):
        links[1].link._connection.sock.send(b"\xff" * 8)
        assert "sent what is no control message (a message of 4294967295 bytes was announced" in links[0].failure()


def test_messages_come_whole_from_bytes_in_pieces() -> None:
    messages = [{"kind": "go", "members": [0, 1], "reason": "größer"}, {"kind": "beat"}]
    data = b"".join(map(pack, messages))
    unpacker = Unpacker()
    found = [message for at in range(len(data)) for message in unpacker.feed(data[at : at + 1])]
    assert found == messages
    assert unpacker.feed(data[:3]) == []
    assert unpacker.feed(data[3:]) == messages


def test_a_message_beyond_the_limit_is_refused_on_either_side() -> None:
    with pytest.raises(BadInput, match=r"a record message has \d+ bytes; at most 1048576"):
        pack({"kind": "record", "text": "x" * wire.LIMIT_BYTES})
    with pytest.raises(NoMessage, match="a message of 1048577 bytes was announced"):
        Unpacker().feed(struct.pack(">I", wire.LIMIT_BYTES + 1))


# ---------------------------------------------------------------- where


def test_worker_0_that_says_nothing_is_named() -> None:
    with pytest.raises(ProcessLost, match=r"worker 0 has not said within 0\.1 s where it can be reached"):
        Link(1, HashStore(), lambda message: None, lambda error: None, arrival_s=0.1)


def test_an_address_where_nobody_answers_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = HashStore()
    addresses.HubAddress(["127.0.0.1"], port).publish(store)
    with pytest.raises(ProcessLost, match=f"127.0.0.1 port {port}: Connection refused.*; set QUORATE_ADDRESS there"):
        Link(1, store, lambda message: None, lambda error: None)


def test_loopback_of_another_host_is_never_tried() -> None:
    store = HashStore()
    addresses.HubAddress(["127.0.0.1"], 9, network="another").publish(store)
    with pytest.raises(ProcessLost, match="it listens on loopback only"):
        Link(1, store, lambda message: None, lambda error: None)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "host"}, True),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "10.0.0.1"}, False),
        ({}, False),
    ],
)
def test_the_launcher_says_whether_all_are_on_one_host(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert addresses.world_is_on_one_host() is expected


def test_with_several_hosts_it_listens_where_they_can_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with gathered(2) as (hub, links):
        assert hub._listener.getsockname()[0] in ("::", "0.0.0.0")
        links[0].finish()


def test_the_address_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUORATE_ADDRESS", "localhost")
    with gathered(1) as (hub, _):
        assert hub._address.addresses == ["localhost"]
    monkeypatch.setenv("QUORATE_ADDRESS", "no such host!")
    with pytest.raises(BadInput, match="QUORATE_ADDRESS is 'no such host!', which is no address"):
        Hub(1)
