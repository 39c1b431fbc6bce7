"""The options of the Ray engine: what they say to it, where they are refused, and what a run that goes on needs again.

Nothing here starts Ray; tests/engines/ray/test_cli.py does.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import quorate
from quorate.cli.engine_options import RayOptions, choose_place, parse_resources, resources_text
from quorate.cli.options import ClusterOptions, EngineOptions, TaskOptions, UpdateOptions
from quorate.errors import BadInput
from quorate.training import engine_of

from .conftest import Quorate

ON_RAY = ("train", "--engine", "ray", "--task", "tasks.py:Line", "--quiet")
BAD = {
    "resource without an amount": (["--resources", "stable"], r"'stable', but it must be NAME=AMOUNT.*e\.g\. stable=1"),
    "resource without a name": (["--shard-resources", "=1"], "shard_resources is '=1', but it must be NAME=AMOUNT"),
    "negative resource": (["--resources", "a=1,b=-1"], "amounts above 0"),
    "resource that is no number": (["--resources", "a=nan"], "amounts above 0"),
    "CPUs as a resource": (["--resources", "CPU=2"], "CPU has an option of its own; give --cpus"),
    "environment nowhere": (["--runtime-env", "none.json"], "'none.json', but there is no such file; give a JSON file"),
    "environment torn": (["--runtime-env", '{"pip": '], "cannot be read as JSON: Expecting value"),
    "environment of another kind": (["--runtime-env", '["einops"]'], "must be a JSON object, e.g."),
    "folder nowhere": (["--working-dir", "none"], "working_dir is 'none', but there is no such folder"),
    "one GPU by its number": (["--device", "cuda:1", "--gpus", "1"], "workers on Ray compute on cpu or cuda"),
    "GPU without one": (["--device", "cuda"], r"give gpus=1 \(--gpus 1\)"),
    "negative CPUs": (["--cpus", "-1"], "cpus is -1.0, but it must be a number from 0 up"),
    "no shards": (["--shards", "0"], "shards is 0, but it must be at least 1"),
    "negative wait": (["--wait", "-1"], "a time to wait cannot be negative"),
    "nobody there": (["--address", "127.0.0.1:1"], "nothing answers at 127.0.0.1:1"),
    "random crashes": (["--faults", "crash:100,5"], r"e\.g\. lose:3@2; crash: is for simulated ones"),
}


@pytest.fixture(scope="session", autouse=True)
def ray_is_imported() -> None:
    """Ray sets a variable of its own when it is imported; let it do so before anybody looks."""
    pytest.importorskip("ray")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_a_sentence(quorate_command: Quorate, here: Path, case: str) -> None:
    arguments, message = BAD[case]
    ran = quorate_command(*ON_RAY, *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1, "one line"
    assert re.search(message, ran.err), ran.err
    assert [entry.name for entry in here.iterdir() if entry.name != "__pycache__"] == ["tasks.py"], "nothing is written"


@pytest.mark.parametrize("command", [["train"], ["train", "--engine", "simulated"], ["compare"]])
def test_without_ray_its_options_are_refused(quorate_command: Quorate, command: list[str]) -> None:
    for option in ("--address=auto", "--shards=2", "--cpus=2.0", "--runtime-env={}", "--wait=5.0", "--working-dir=."):
        ran = quorate_command(*command, option)
        shown = option.replace("=", " ", 1)
        assert ran.status == 2
        assert ran.err == f"error: {shown} was given, but it is for Ray; leave it out, or add --engine ray\n"


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_what_only_a_simulation_knows_is_refused_elsewhere(quorate_command: Quorate, command: str, engine: str) -> None:
    for option in ("--network=latency=1ms", "--no-gradients", "--together", "--apart"):
        ran = quorate_command(command, "--engine", engine, option)
        assert ran.status == 2
        assert f"the {engine} engine's workers are real; leave it out, or add --engine simulated" in ran.err


@pytest.mark.parametrize("command", [ON_RAY, ("compare", "--engine", "ray", "--quiet")])
def test_without_the_library_there_is_one_sentence(
    quorate_command: Quorate, here: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    ran = quorate_command(*command)
    install = "pip install 'quorate[ray]' (in a clone: pip install '.[ray]')"
    sentence = f"error: the Ray engine needs Ray, which is not installed: {install}\n"
    assert (ran.status, ran.out, ran.err) == (2, "", sentence)
    assert not (here / "runs").exists()


def test_options_reach_the_engine(here: Path) -> None:
    (here / "env.json").write_text('{"env_vars": {"A": "1"}}')
    options = RayOptions(
        **{"address": "10.0.0.1:6379", "shards": 2, "cpus": 0.5, "gpus": 1.0, "resources": "fast=1, disk=0.5"},
        **{"shard_resources": "stable=1", "working_dir": ".", "runtime_env": "env.json", "wait": 30.0},
    )
    cluster = ClusterOptions(threads=2, latency="constant:1", faults="lose:1@2")
    place = choose_place(EngineOptions(engine="ray", wire="bf16"), cluster, options, TaskOptions(), UpdateOptions())
    engine = place.engine(8, None)
    assert isinstance(engine, quorate.Ray)
    assert engine.describe() == {
        **{"name": "ray", "shards": 2, "cpus": 0.5, "gpus": 1.0, "resources": {"fast": 1.0, "disk": 0.5}},
        **{"threads": 2, "device": "cuda", "latency": "constant:1", "faults": "lose:1@2", "wire": "bf16"},
        "arithmetic": engine.describe()["arithmetic"],
    }
    assert (engine.workers, engine.address, engine.working_dir, engine.wait_s) == (8, "10.0.0.1:6379", ".", 30.0)
    assert engine.shard_resources == {"stable": 1.0}
    assert engine.runtime_env == {"env_vars": {"A": "1"}}
    assert options.options_to_repeat() == (
        " --address 10.0.0.1:6379 --shard-resources stable=1 --working-dir . --runtime-env env.json --wait 30.0"
    )


def test_the_device_follows_the_gpus() -> None:
    for gpus, device in ((None, "cpu"), (0.5, "cuda")):
        on_ray = EngineOptions(engine="ray"), ClusterOptions(), RayOptions(gpus=gpus)
        place = choose_place(*on_ray, TaskOptions(), UpdateOptions())
        assert place.engine(2, None).describe()["device"] == device


def test_an_engine_is_made_again_from_what_it_says_of_itself() -> None:
    first = quorate.Ray(3, shards=2, cpus=0.5, resources={"fast": 1.0}, threads=2, latency="constant:1", wire="bf16")
    again = engine_of(json.loads(json.dumps(first.describe())), 3, address="auto", wait_s=5.0)
    assert again.describe() == first.describe()
    assert isinstance(again, quorate.Ray)
    assert (again.workers, again.address, again.wait_s) == (3, "auto", 5.0)


def test_resources_are_read_as_they_are_written() -> None:
    text = "fast=1,disk=0.5"
    assert resources_text(parse_resources("resources", text)) == text
    assert resources_text({}) is None


# ---------------------------------------------------------------- going on


@pytest.fixture
def recorded(quorate_command: Quorate, here: Path) -> Path:
    """The folder of a run on the local engine whose header says that it was made on Ray: enough for what is checked
    before anything starts."""
    made = ("train", "--task", "tasks.py:Line", "--workers", 1, "--updates", 2, "--out", "run", "--quiet")
    assert quorate_command(*made).status == 0
    return here / "run"


def on_ray(run: Path, **engine: Any) -> None:
    trace = run / "trace.jsonl"
    header, rest = trace.read_text().split("\n", 1)
    said = json.loads(header)
    said["engine"] = {**said["engine"], "name": "ray", "shards": 1, "cpus": 1.0, "gpus": 0.0, "resources": {}, **engine}
    trace.write_text(json.dumps(said) + "\n" + rest)


CONTRADICTIONS = {
    "--engine local": "with --engine ray",
    "--shards 2": "with --shards 1",
    "--cpus 2.0": "with --cpus 1.0",
    "--gpus 1.0": "with --gpus 0.0",
    "--resources fast=2": "with --resources fast=1,disk=0.5",
}


def test_contradictions_are_refused(quorate_command: Quorate, recorded: Path) -> None:
    resume = ("train", "--resume", "run", "--updates", 3, "--quiet")
    ran = quorate_command(*resume, "--engine", "ray")
    assert "--engine ray was given, but the run in 'run' was made with --engine local" in ran.err
    ran = quorate_command(*resume, "--address", "auto")
    assert (ran.status, ran.err) == (
        2,
        "error: --address auto was given, but the run in 'run' was not made on Ray; leave it out\n",
    )
    on_ray(recorded, resources={"fast": 1.0, "disk": 0.5})
    for options, made in CONTRADICTIONS.items():
        ran = quorate_command(*resume, *options.split())
        assert ran.status == 2, options
        assert ran.err == (
            f"error: {options} was given, but the run in 'run' was made {made}; leave it out, or start a new run\n"
        )
    same = ("--engine", "ray", "--cpus", 1, "--resources", "disk=0.5,fast=1", "--address", "127.0.0.1:1", "--wait", 1)
    ran = quorate_command(*resume, *same)
    assert ran.status == 2
    assert ran.err.startswith("error: nothing answers at 127.0.0.1:1"), "all of it was taken, and the address is new"


def test_an_engine_of_another_kind_cannot_go_on(recorded: Path) -> None:
    with pytest.raises(BadInput, match="made on the local engine, whose checkpoints the ray engine cannot read"):
        quorate.resume(recorded, engine=quorate.Ray(1), updates=3)


def test_the_command_to_go_on_says_again_what_is_not_recorded(
    quorate_command: Quorate, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is still starting, on a cluster somewhere else, when SIGTERM comes."""

    def stopped(engine: quorate.Ray, job: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        assert job.stop.reason == "stopped by SIGTERM"
        raise KeyboardInterrupt  # as engines do that are not open yet

    monkeypatch.setattr(quorate.Ray, "open", stopped)
    ran = quorate_command(*ON_RAY, "--workers", 2, "--address", "10.0.0.1:6379")
    assert (ran.status, ran.err) == (
        143,
        "stopped full-sync 2 before the first update; there is no checkpoint to go on from, nothing was written\n",
    )
    on_ray(recorded)
    resume = "train --resume run --address 10.0.0.1:6379 --working-dir 'my tasks'"
    ran = quorate_command(*shlex.split(resume), "--updates", 3)
    assert ran.status == 143
    assert ran.err == (
        "full-sync 1: starting a worker on Ray\n"
        "stopped full-sync 1 before the first update; the checkpoint of update 2 is in 'run'; "
        f"to go on: quorate {resume}\n"
    )
