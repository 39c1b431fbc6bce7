"""benchmarks/network: what is asked for, how the rate is found, what counts as reached, and the hosts themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.network import calibrating, elsewhere, floors, hosts, stragglers, sweep, workload
from benchmarks.network.__main__ import RATIOS, parsed, plan
from benchmarks.network.contenders import CONTENDERS, DEFAULT

ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------- what is asked for


def test_everything_is_measured_unless_less_is_asked_for() -> None:
    given = parsed([])
    assert (given.hosts, given.repeats, given.iterations, given.only) == (4, 3, 30, list(DEFAULT))
    assert plan(given) == [("alexnet", list(RATIOS)), ("googlenet", list(RATIOS)), ("alexnet25m", [None])]


def test_quick_is_one_repeat_where_communication_equals_computation() -> None:
    given = parsed(["--quick", "--only", "ddp", "ours", "ddp"])
    assert (given.repeats, given.only) == (1, ["ddp", "ours"])
    assert plan(given) == [("alexnet", [1.0]), ("googlenet", [1.0])]


def test_ratios_are_numbers_or_unlimited() -> None:
    assert parsed(["--ratio", "0.5", "unlimited"]).ratio == [0.5, None]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hosts", "1"], "--hosts must be 2 to 250"),
        (["--ratio", "half"], "half is no ratio of communication to computation"),
        (["--ratio", "0"], "give numbers above 0"),
        (["--ratio", "nan"], "give numbers above 0"),
        (["--repeats", "0"], "at least 1"),
        (["--timeout", "-1"], "--timeout above 0"),
        (["--net", "resnet"], "invalid choice: 'resnet'"),
        (["--only", "horovod"], "invalid choice: 'horovod'"),
        (["--figure", "bars.svg"], "must be a .png file"),
        (["--figure", "no/such/folder/bars.png"], "in a folder that exists"),
    ],
)
def test_wrong_wishes_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parsed(arguments)
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rate", "0"], "--rate must be"),
        (["--updates", "1"], "--updates at least 2"),
        (["--case", "a"], "invalid choice"),
    ],
)
def test_wrong_wishes_of_stragglers_are_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        stragglers.parsed(arguments)
    assert refused.value.code == 2
    assert says in capsys.readouterr().err


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert hosts.why_not() == (
        "This benchmark makes network namespaces and rate limits, which needs root: run it with sudo."
    )


def test_without_the_tools_it_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert hosts.why_not() == "This benchmark needs tc (packages iproute2 and util-linux)."


# ---------------------------------------------------------------- calibration


def a_link(fixed_s: float, bits: float, headers: float) -> tuple[list[float | None], calibrating.Calibrated]:
    """Calibrate on a link that takes a fixed time plus the bits over the rate, to 0.2 s."""
    asked: list[float | None] = []

    def measure_s(rate: float | None) -> float:
        asked.append(rate)
        return fixed_s + (0.0 if rate is None else headers * bits / rate)

    return asked, calibrating.calibrate(measure_s, bits / 8, 0.2)


def test_a_ring_sends_less_than_twice_the_size() -> None:
    assert calibrating.wire_bytes(8_000_000, 4) == 12_000_000
    assert calibrating.wire_bytes(8_000_000, 2) == 8_000_000


@pytest.mark.parametrize(("fixed_s", "headers"), [(0.0, 1.0), (0.02, 1.3), (0.1, 2.0), (0.15, 1.05)])
def test_the_rate_is_found(fixed_s: float, headers: float) -> None:
    asked, found = a_link(fixed_s, 1e8, headers)
    assert found.communication_s == pytest.approx(0.2, rel=calibrating.CLOSE_ENOUGH)
    assert found.rate_bits_per_s is not None
    assert (
        found.communication_s == fixed_s + headers * 1e8 / found.rate_bits_per_s
    )  # what was measured at that very rate
    assert len(asked) <= 6


def test_a_machine_that_is_slower_than_wanted_without_a_limit_has_none() -> None:
    asked, found = a_link(0.3, 1e8, 1.0)
    assert (asked, found) == ([None], calibrating.Calibrated(None, 0.3))


def test_the_share_of_the_rate_that_was_used() -> None:
    assert calibrating.achieved(sent_bytes=10e6, communication_s=0.25, rate_bits_per_s=400e6) == pytest.approx(0.8)


# ---------------------------------------------------------------- figures


def runs_of(**seconds: list[float | None]) -> dict[str, list[sweep.Row]]:
    def run(s: float | None) -> sweep.Row:
        if s is None:
            return {"failed": "hung"}
        return {"iterations_per_s": 1 / s, "iteration_s": s, "noise_cores": 0.0, "cpu_ms_per_iteration": 1.0}

    return {name: [run(s) for s in repeats] for name, repeats in seconds.items()}


def test_ratios_are_medians_of_the_ratios_within_a_repeat() -> None:
    runs = runs_of(ddp=[0.4, 0.8, 0.4], delayed1=[0.2, 0.5, None], none=[0.2, 0.4, 0.2], comm=[0.1, 0.45, 0.2])
    row = sweep.row("delayed1", runs, {"ratio": 1.0})
    assert row["over"]["ddp"] == pytest.approx((2.0 + 1.6) / 2)
    assert row["over"]["limit"] == pytest.approx((1.0 + 0.9) / 2)  # the slower of the two bounds, repeat by repeat
    assert row["over"]["blocking"] is None
    assert row["missed"] == ["? < 1.7× blocking"]


def test_floors_where_communication_equals_computation_and_elsewhere() -> None:
    assert floors.missed("ours", 1.0, {"ddp": 1.09}) == ["1.09 < 1.1× ddp"]
    assert floors.missed("ours", 0.5, {"ddp": 0.96}) == []
    assert floors.missed("delayed3", None, {"ddp": 0.94}) == ["0.94 < 0.95× ddp"]
    assert floors.missed("delayed1", 1.0, {"ddp": 1.4, "blocking": 1.7, "limit": 0.9}) == []
    assert floors.missed("ddp", 1.0, {"ddp": 0.5}) == []


def test_what_others_disturbed_says_so() -> None:
    runs = runs_of(ddp=[0.4], ours=[0.3], none=[0.2], comm=[0.2])
    assert sweep.row("ours", runs, {"ratio": 1.0})["disturbed"] is False
    runs["ddp"][0]["noise_cores"] = 1.0
    assert sweep.row("ours", runs, {"ratio": 1.0})["disturbed"] is True
    assert sweep.verdict(True, True) == "reached, disturbed"


def test_the_all_reduce_of_a_stragglers_limit_is_the_least_disturbed() -> None:
    given = stragglers.parsed(["--quick"])
    runs = runs_of(comm=[0.075, 0.005], backup=[0.1, 0.1])
    row = stragglers.row("backup", "b", runs, given)
    sleeping_s = stragglers.limit_s("backup", "b", given.warmup, given.warmup + given.updates)
    assert sleeping_s is not None
    assert row["limit_s"] == pytest.approx(sleeping_s + 0.005)
    assert row["of_limit"] == pytest.approx(row["limit_s"] / 0.1)
    assert row["reached"] is False


def test_limits_of_the_stragglers_are_ordered() -> None:
    for case in stragglers.CASES:
        of_all, of_six, finishing = (stragglers.limit_s(who, case, 10, 110) for who in ("ddp", "backup", "finish"))
        assert of_all is not None and of_six is not None and finishing is not None
        assert of_six == pytest.approx(0.05) or of_six > 0.05
        assert of_six <= finishing < of_all


def test_the_bars_can_be_drawn_again(tmp_path: Path) -> None:
    runs = runs_of(**{name: [0.2 + 0.01 * i] for i, name in enumerate(CONTENDERS)})
    rows = [sweep.row(name, runs, {"net": "alexnet", "ratio": ratio}) for ratio in (1.0, None) for name in runs]
    (tmp_path / "report.json").write_text(json.dumps({"rows": rows}))
    command = [sys.executable, "-m", "benchmarks.network.figure", f"{tmp_path / 'report.json'}"]
    refused = subprocess.run([*command, "bars.svg"], cwd=ROOT, capture_output=True, text=True)
    assert (refused.returncode, "must have rows, and the figure be a .png" in refused.stderr) == (2, True)
    subprocess.run([*command, f"{tmp_path / 'bars.png'}"], cwd=ROOT, check=True)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- nets


@pytest.mark.parametrize("net", ["alexnet", "googlenet"])
def test_a_stand_in_has_the_parameters_of_its_net_and_their_gradients(net: str) -> None:
    real = workload.model(net)
    (pictures, classes), *_ = workload.pictures(net, 0)
    layers = elsewhere.used_layers(real, pictures[:1])
    stand_in = elsewhere.computed_elsewhere(real, pictures[:1], forward_s=1e-4)
    assert sum(p.numel() for p in stand_in.parameters()) == sum(p.numel() for p in real.parameters())
    assert [p.shape for p in stand_in.parameters()] == [p.shape for layer, _ in layers for p in layer.parameters()]
    torch.nn.functional.cross_entropy(stand_in(pictures), classes).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in stand_in.parameters())


def test_a_layer_takes_the_share_of_its_multiplications() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(4 * 64, 10))
    layers = elsewhere.used_layers(net, torch.zeros(2, 3, 8, 8))
    assert [products for _, products in layers] == [2 * 64 * 4 * 3 * 9, 2 * 10 * 4 * 64]


# ---------------------------------------------------------------- hosts


def test_only_names_of_this_benchmark_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, others = "quorate-bench-12-host3 (id: 4)\nquorate-bench-12-switch\n", "blue\nquorate-bench-x-host1\n"
    listed = f"{mine}\n{others}my-quorate-bench-1-host1\n"
    monkeypatch.setattr(
        hosts.subprocess, "run", lambda *command, **how: subprocess.CompletedProcess(command, 0, listed, "")
    )
    assert list(hosts.namespaces()) == ["quorate-bench-12-host3", "quorate-bench-12-switch"]
    assert hosts.owner("quorate-bench-12-host3") == 12


def test_a_fast_link_has_a_bucket_of_a_millisecond() -> None:
    assert hosts.bucket(400e6) == ["tbf", "rate", "400000000bit", "burst", "131072", "latency", "50ms"]
    assert hosts.bucket(8e9)[4] == "1000000"


needs_hosts = pytest.mark.skipif(hosts.why_not() is not None, reason=hosts.why_not() or "")


@needs_hosts
def test_hosts_reach_each_other_at_their_rate_and_are_removed() -> None:
    with hosts.Hosts(2) as two:
        two.limit(100e6)
        shown = subprocess.run(
            two.inside(1, ["tc", "qdisc", "show", "dev", hosts.INTERFACE]), capture_output=True, text=True
        ).stdout
        assert "tbf" in shown and "rate 100Mbit" in shown
        listen = "import socket; s = socket.create_server(('10.77.0.1', 4000)); print('up', flush=True)"
        listen += "; print(s.accept()[1][0])"
        call = "import socket; socket.create_connection(('10.77.0.1', 4000), timeout=20).close()"
        with subprocess.Popen(
            two.inside(0, [sys.executable, "-c", listen]), stdout=subprocess.PIPE, text=True
        ) as listening:
            assert listening.stdout is not None
            assert listening.stdout.readline() == "up\n"
            subprocess.run(two.inside(1, [sys.executable, "-c", call]), check=True, timeout=30)
            assert listening.stdout.read() == "10.77.0.2\n"
        two.limit(None)
        names = [two.namespace(host) for host in range(2)]
        assert set(names) < set(hosts.namespaces())
    assert not set(names) & set(hosts.namespaces())


@needs_hosts
def test_what_a_killed_run_left_behind_is_removed_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, signal; from benchmarks.network.hosts import Hosts; Hosts(2)._make();"
            "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGKILL)",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    left = {name for name in hosts.namespaces() if hosts.owner(name) == int(killed.stdout)}
    assert len(left) == 3
    removed: list[str] = []
    remove = hosts._remove_namespace

    def remove_only_ours(name: str) -> None:
        removed.append(name)
        if name in left:  # whatever the code under test does, a run of somebody else is not this test's to end
            remove(name)

    alive = hosts.Hosts(2)
    try:
        alive._make()
        monkeypatch.setattr(hosts, "_remove_namespace", remove_only_ours)
        hosts.remove_stale()
        monkeypatch.undo()
    finally:
        alive._remove()
    assert left <= set(removed)
    assert alive.namespace(0) not in removed
    assert not left & set(hosts.namespaces())


@pytest.mark.long
@needs_hosts
def test_two_contenders_on_two_hosts(tmp_path: Path) -> None:
    command = ["--hosts", "2", "--net", "alexnet", "--ratio", "unlimited", "--only", "none", "ddp", "--iterations", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.network", "--quick", "--quiet", "0", *command, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    none, ddp = json.loads(done.stdout)["rows"]
    assert (none["contender"], ddp["contender"]) == ("none", "ddp")
    weights = ddp["runs"][0]["weights"]
    assert weights[0] == weights[1]  # DDP keeps the hosts alike: they have talked to each other
    assert none["runs"][0]["weights"][0] != none["runs"][0]["weights"][1]
