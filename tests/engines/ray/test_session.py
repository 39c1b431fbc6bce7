"""A Ray of our own: reachable by nobody else, quiet, and gone afterwards; and what cannot be started."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from quorate.engines.ray import connection, session
from quorate.engines.ray.connection import FoundCluster, connect
from quorate.engines.ray.security import listeners
from quorate.errors import BadInput, install_line
from tests.engines.ray.conftest import ONE_CPU
from tests.engines.ray.processes import descendants

pytestmark = pytest.mark.ray


def ports_of(processes: set[int]) -> set[int]:
    """The ports on which these processes listen."""
    inodes = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            target = str(entry.readlink()) if entry.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(int(fields[1].split(":")[1], 16))
    return found


def test_a_ray_of_our_own_is_private_quiet_and_gone_afterwards(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_FOLDER", own := f"quorate-ray-{os.getpid()}-")  # others run Ray here, too
    handler = signal.getsignal(signal.SIGTERM)
    opened = connect(address=None, workers=3, demand=ONE_CPU._replace(cpus=2.5, resources={"spot": 1.0}))
    try:
        import ray

        @ray.remote(num_cpus=0)
        def speak() -> bool:
            print("a word of a worker")  # noqa: T201
            return os.environ.get("RAY_AUTH_MODE") == "token" and len(os.environ.get("RAY_AUTH_TOKEN", "")) == 64

        asked_for_a_token: bool = ray.get(speak.remote())
        assert opened._session is not None and asked_for_a_token
        (node,) = opened.nodes()
        assert (node.id, node.address, node.is_head, node.draining_by_s) == (
            opened.driver_node,
            "127.0.0.1",
            True,
            None,
        )
        assert (node.resources["CPU"], node.resources["spot"]) == (8.0, 3.0)  # 7.5 CPUs are asked for
        assert node.object_store_bytes == session._store_bytes() <= session.OBJECT_STORE_BYTES
        processes = descendants(os.getpid())
        ports = ports_of(processes | {os.getpid()})
        assert ports
        assert {one.host for one in listeners() if one.port in ports} == {"127.0.0.1"}
        assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
        assert signal.getsignal(signal.SIGTERM) is handler
        (folder,) = Path(session._short_folder()).glob(f"{own}*")
        assert not [file for file in folder.rglob("*token*") if file.is_file()]
        said = ""
        while "a word of a worker" not in said:  # Ray reads it from a log, a moment later
            time.sleep(0.05)
            printed = capfd.readouterr()
            assert printed.out == ""
            said += printed.err
        assert "\x1b" not in said
    finally:
        opened.close()
    opened.close()  # twice does no harm
    while {one for one in processes if Path(f"/proc/{one}").exists()}:  # Ray's workers end with the raylet
        time.sleep(0.05)
    assert not list(Path(session._short_folder()).glob(f"{own}*"))
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_the_folder_of_a_run_that_was_killed_goes_with_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(session, "_short_folder", lambda: str(tmp_path))
    alive = session.Session()
    killed = tmp_path / "quorate-ray-killed"
    (killed / "session_1").mkdir(parents=True)
    (killed / "in-use").touch()
    foreign = tmp_path / "quorate-ray-foreign"  # not made by us: nothing says that it is abandoned
    foreign.mkdir()
    session._remove_abandoned()
    assert alive.folder.is_dir() and foreign.is_dir() and not killed.exists()
    alive._lock.close()


def test_sockets_get_a_short_folder_where_the_usual_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: "/scratch")
    assert session._short_folder() == "/scratch"
    monkeypatch.setattr(session.tempfile, "gettempdir", lambda: "/scratch/" + "x" * 40)
    assert session._short_folder() == "/tmp"


# ---------------------------------------------------------------- bad input


def refused(**settings: object) -> str:
    usual: dict[str, object] = {"address": None, "workers": 1, "demand": ONE_CPU}
    with pytest.raises(BadInput) as caught:
        connect(**{**usual, **settings})  # type: ignore[arg-type]
    return str(caught.value)


def test_without_ray_there_is_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused() == f"the Ray engine needs Ray, which is not installed: {install_line('ray')}"


def test_environments_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.touch()
    assert "there is no such folder" in refused(working_dir=str(tmp_path / "nowhere"))
    assert "which is a file; give the folder" in refused(working_dir=str(file))
    assert "give one of them" in refused(working_dir=str(tmp_path), runtime_env={"working_dir": "/other"})
    assert "must be a dict" in refused(runtime_env=["pip"])
    assert "not one that Ray takes" in refused(runtime_env={"pip": 7})


def test_an_address_in_the_environment_is_used_and_a_wrong_one_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    said = refused()
    assert "Ray's client protocol" in said and said.endswith("(this address is from RAY_ADDRESS)")


def test_a_folder_too_large_to_send(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ray._private.runtime_env import packaging

    monkeypatch.setattr(packaging, "GCS_STORAGE_MAX_SIZE", 2_000_000)
    (tmp_path / "data.bin").write_bytes(os.urandom(3_000_000))
    said = refused(working_dir=str(tmp_path))
    assert "the working_dir has 2.86MiB, and Ray sends at most 1.91MiB to the nodes; keep large files out" in said


def test_a_public_cluster_that_takes_anybody_is_warned_of_before_it_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(**_: object) -> None:
        raise ConnectionError("not today.")

    found = FoundCluster("8.8.8.8:6379", takes_anyone=True, nodes=("10.0.0.1",), dashboard="", on_loopback=False)
    monkeypatch.setattr(connection, "reach", lambda address: found)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.warns(RuntimeWarning, match="asks for no token: Ray executes code for whoever reaches it"):
        assert "Ray could not be reached: not today; `ray status`" in refused(address="8.8.8.8:6379")
