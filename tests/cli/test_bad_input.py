"""Bad input gets a sentence with the value, the rule and the remedy; exit status 2, and nothing is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import Quorate

SIMULATED = ("--engine", "simulated")
CASES = {
    "quorum of none": (["simulate", "--workers", "0+2"], r"'0\+2'.*quorum is 0.*at least 1, as in 1\+2"),
    "negative backups": (["simulate", "--workers", "6+-2"], r"backups are -2.*quorum 6 is above the 4 workers.*6\+0"),
    "minus": (["simulate", "--workers", "6-2"], r"'6-2'.*must be N\+b, e\.g\. 6\+2"),
    "no workers": (["simulate", "--workers", "0"], "workers is 0, but it must be at least 1"),
    "smallest quorum above the quorum": (
        ["simulate", "--workers", "6+2", "--policy", "deadline", "--min-quorum", "7"],
        "min_quorum is 7, but the quorum is 6; lower",
    ),
    "policy": (
        ["simulate", "--policy", "magic"],
        "policy 'magic' is not known; choose one of: adaptive, async, backup",
    ),
    "smallest quorum above workers": (
        ["simulate", "--workers", "3+1", "--policy", "adaptive", "--min-quorum", "5"],
        "min_quorum is 5, but the run has 4 workers; lower it or add workers",
    ),
    "smallest quorum of none": (
        ["simulate", "--policy", "adaptive", "--min-quorum", "0"],
        "min_quorum is 0, but it must be at least 1",
    ),
    "explores too much": (
        ["simulate", "--policy", "adaptive", "--explore", "0.9"],
        "explore is 0.9, but it is a share of the progress, between 0 and 0.5",
    ),
    "negative noise": (
        ["simulate", "--policy", "adaptive", "--noise-scale", "-1"],
        "noise_scale is -1.0, but it is a number of samples; leave it out to learn it",
    ),
    "quorum learned and given": (
        ["simulate", "--policy", "adaptive", "--quorum", "3"],
        "--quorum 3 does not fit policy 'adaptive'; it is for softsync, k-batch, deadline, and adaptive takes "
        "--noise-scale, --min-quorum, --explore",
    ),
    "change without a model": (["simulate", "--latency", "constant:1->60"], "lacks a time or a model between two '->'"),
    "policies": (
        ["compare", "--policies", "async,magic"],
        "policy 'magic' is not known; choose one of: adaptive, async, backup",
    ),
    "policies twice": (["compare", "--policies", "async,async"], "names async twice"),
    "no policies": (["compare", "--policies", ","], "at least one, e.g. full-sync,backup"),
    "task": (
        ["simulate", "--task", "magic"],
        "task 'magic' is not known; choose one of: cartpole, charlm, cifar10, ",
    ),
    "task file": (["simulate", "--task", "none.py:Line"], "'none.py' does not exist; give file.py:Class"),
    "task class": (["simulate", "--task", "tasks.py:None"], "no class 'None'"),
    "engine": (["compare", "--engine", "magic"], "engine 'magic' is not known; choose one of: local, ray, simulated"),
    "train engine": (["train", "--engine", "magic"], "engine 'magic' is not known; choose one of: local, ray"),
    "latency": (["simulate", "--latency", "magic:1"], "latency model 'magic' is not known; choose one of: chen2016"),
    "latency text": (
        ["simulate", "--latency", "constant:x"],
        "'x' in constant is not a number; write constant:SECONDS",
    ),
    "negative time": (["simulate", "--latency", "constant:-1"], "-1.0, but must be a finite number above 0; write"),
    "network": (["simulate", "--network", "fast"], "'fast' is not understood; write e.g. bandwidth=1Gbps"),
    "faults": (["simulate", "--faults", "die"], "'die' is not understood; write e.g. lose:3@10"),
    "task without loss": (["simulate", "--task", "tasks.py:Lacking"], r"no method 'loss'; a task needs model\(\)"),
    "vector loss": (
        ["simulate", "--task", "tasks.py:Vector"],
        r"shape \(4, 1\), but it must be a scalar.*take the mean",
    ),
    "no data": (["simulate", "--task", "tasks.py:Empty"], "the data set is empty"),
    "large batch": (["simulate", "--batch-size", "9999"], "batch_size is 9999, but .* 1438 samples; choose"),
    "round beyond epoch": (
        ["simulate", "--batch-size", "1438"],
        "takes 8 batches .* choose a batch_size of at most 179",
    ),
    "no updates": (["simulate", "--updates", "0"], "updates is 0, but it must be at least 1"),
    "until": (["simulate", "--until", "good"], "until 'good' is not understood; write e.g. 'accuracy>=0.95'"),
    "until unknown": (["simulate", "--until", "acuracy>=1"], "gives no 'acuracy' .did you mean accuracy"),
    "until unmeasured": (
        ["simulate", "--task", "tasks.py:Unmeasured", "--until", "accuracy>=1"],
        "gives no 'accuracy'; choose one of: loss, samples, seconds, updates",
    ),
    "until without gradients": (
        ["simulate", "--no-gradients", "--until", "accuracy>=1"],
        "a run without gradients gives no 'accuracy'; choose one of: samples, seconds, updates",
    ),
    "target unknown": (
        ["compare", *SIMULATED, "--target", "speed>=1"],
        "gives no 'speed'; choose one of: accuracy, test_loss",
    ),
    "target unmeasured": (
        ["compare", *SIMULATED, "--task", "tasks.py:Unmeasured", "--target", "accuracy>=1"],
        r"no evaluate\(\) that gives 'accuracy'",
    ),
    "target without gradients": (
        ["compare", *SIMULATED, "--no-gradients", "--target", "accuracy>=1"],
        "nothing is measured",
    ),
    "clip": (["simulate", "--clip-norm", "-1"], "clip_norm is -1.0, but"),
    "seed": (["simulate", "--seed", "-1"], "seed is -1, but it must be at least 0"),
    "device": (["simulate", "--device", "abacus"], "device 'abacus' is not known to torch; write e.g. cpu"),
    "patience": (["simulate", "--patience", "-1"], "cannot be negative"),
    "ema without gradients": (["simulate", "--no-gradients", "--ema", "0.9"], "--ema 0.9 .* needs gradients; leave it"),
    "size with gradients": (["simulate", "--model-bytes", "9"], "leave it out or add --no-gradients"),
    "negative size": (["simulate", "--no-gradients", "--model-bytes", "-9"], "cannot be negative"),
    "figure": (["compare", "--figure", "x.txt"], r"must end in one of: \.png"),
    "figure nowhere": (["compare", "--figure", "no/x.png"], "'no' does not exist; make it first"),
    "figure of nothing": (
        ["compare", *SIMULATED, "--no-gradients", "--policies", "async", "--figure", "x.png"],
        "add it to --policies",
    ),
    "epochs of a stream": (
        ["simulate", "--task", "tasks.py:Stream", "--no-gradients", "--epochs", "1"],
        "endless stream; give --updates",
    ),
    "wire": (["train", "--wire", "fp8"], "wire is 'fp8', but .* one of: fp32, bf16"),
    "real crashes": (["train", "--faults", "crash:100,5"], r"e\.g\. lose:3@2; crash: is for simulated ones"),
    "train device": (["train", "--device", "abacus"], "device 'abacus' is not known to torch; write e.g. cpu"),
    "train workers": (["train", "--workers", "6-2"], r"'6-2'.*must be N\+b, e\.g\. 6\+2"),
    "train threads": (["train", "--threads", "0"], "'--threads'.*greater than or equal to 1"),
    "train latency": (["train", "--latency", "magic:1"], "latency model 'magic' is not known"),
    "train updates": (["train", "--updates", "0"], "updates is 0, but it must be at least 1"),
    "train patience": (["train", "--patience", "-1"], "cannot be negative"),
    "checkpoints": (["train", "--checkpoint-every", "0"], "checkpoint_every is 0, but it must be at least 1"),
    "train task": (["train", "--task", "none.py:Line"], "'none.py' does not exist; give file.py:Class"),
    "train module": (["train", "--task", "no.such:Line"], "'no.such' cannot be imported: ModuleNotFoundError"),
    "train vector loss": (["train", "--task", "tasks.py:Vector", "--workers", "2"], "must be a scalar.*take the mean"),
    "only timed": (
        ["train", "--no-gradients"],
        "the local engine's workers are real; leave it out, or add --engine simulated",
    ),
    "option": (["simulate", "--magic"], "No such option: --magic.*; see 'quorate simulate --help'"),
    "command": (["magic"], "No such command 'magic'; see 'quorate --help'"),
    "number": (["simulate", "--updates", "many"], "'--updates'.*integer"),
    "no run": (["replay"], "Missing argument 'RUN'"),
    "run that is not": (["replay", "nowhere"], "'nowhere' does not exist; give a trace.jsonl"),
    "foreign trace": (["replay", "tasks.py"], "'tasks.py' is not a quorate trace"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_a_sentence(quorate_command: Quorate, here: Path, case: str) -> None:
    arguments, message = CASES[case]
    takes_out = arguments[0] in ("train", "simulate", "compare")
    ran = quorate_command(*arguments, *(["--out", "out", "--quiet"] if takes_out else []))
    assert ran.status == 2
    assert ran.out == ""
    assert ran.err.startswith("error: ") and ran.err.count("\n") == 1, "one line"
    assert re.search(message, ran.err), ran.err
    assert [entry.name for entry in here.iterdir() if entry.name != "__pycache__"] == ["tasks.py"], "nothing is written"


@pytest.mark.parametrize(
    ("option", "policy", "takers"),
    [
        ("--late=finish", "async", "backup, k-batch, delayed, deadline"),
        ("--max-staleness=1", "softsync", "async"),
        ("--staleness-weights", "backup", "async, softsync, bounded"),
        ("--quorum=2", "async", "softsync, k-batch, deadline"),
        ("--bound=2", "full-sync", "bounded"),
        ("--quorum=2", "backup", "softsync, k-batch, deadline"),
        ("--delay=2", "full-sync", "delayed"),
        ("--limit=2", "backup", "deadline"),
        ("--min-quorum=2", "backup", "deadline, adaptive"),
        ("--slack=2", "backup", "deadline"),
    ],
)
def test_an_option_of_another_policy_is_refused(
    quorate_command: Quorate, option: str, policy: str, takers: str
) -> None:
    ran = quorate_command("simulate", "--policy", policy, option)
    assert ran.status == 2
    assert f"does not fit policy '{policy}'" in ran.err
    for taker in takers.split(", "):
        assert re.search(rf"it is for .*{taker}", ran.err), ran.err
    assert quorate_command("compare", "--policies", policy, option).status == 2


def test_a_folder_that_holds_a_run_is_left_alone(quorate_command: Quorate, here: Path) -> None:
    command = ("simulate", "--task", "tasks.py:Line", "--out", "run")
    assert quorate_command(*command).status == 0
    before = {file.name: file.read_bytes() for file in (here / "run").iterdir()}
    ran = quorate_command(*command)
    assert ran.status == 2
    assert "'run' already holds a run" in ran.err
    assert {file.name: file.read_bytes() for file in (here / "run").iterdir()} == before
    assert quorate_command("simulate", "--out", "tasks.py").status == 2


def test_a_torn_trace_is_refused_with_its_line(quorate_command: Quorate, here: Path) -> None:
    assert quorate_command("simulate", "--task", "tasks.py:Line", "--out", "run").status == 0
    trace = here / "run" / "trace.jsonl"
    whole = trace.read_text()
    lines = whole.splitlines(keepends=True)
    trace.write_text("".join(lines[:10]))
    assert "is torn: it stops at line 10" in quorate_command("replay", "run").err
    trace.write_text("".join(lines[:10]) + lines[10][:20])
    ran = quorate_command("replay", "run")
    assert ran.status == 2
    assert "is torn: line 11" in ran.err


def test_a_run_that_breaks_off_has_status_1(quorate_command: Quorate) -> None:
    ran = quorate_command("simulate", "--task", "tasks.py:Diverging")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("error: the last 80 gradients held NaN or Inf")
    ran = quorate_command("simulate", "--task", "tasks.py:Line", "--faults", "lose:1@0.1", "--patience", 5)
    assert ran.status == 1
    assert "needs 8 live workers, but only 7 of 8" in ran.err


def test_an_error_in_the_task_keeps_its_traceback(quorate_command: Quorate) -> None:
    with pytest.raises(ZeroDivisionError):
        quorate_command("simulate", "--task", "tasks.py:Broken")


@pytest.mark.parametrize("arguments", [["--wire", "fp8"], ["--batch-size", "9999"], ["--task", "tasks.py:Lacking"]])
def test_bad_input_leaves_no_numbered_folder(quorate_command: Quorate, here: Path, arguments: list[str]) -> None:
    assert quorate_command("train", *arguments).status == 2
    assert not (here / "runs").exists()


@pytest.mark.parametrize("command", [("simulate",), ("train", "--workers", "1"), ("compare",)])
def test_more_threads_than_torch_survives_are_refused(quorate_command: Quorate, command: tuple[str, ...]) -> None:
    ran = quorate_command(*command, "--threads", 1_000_000)
    assert ran.status == 2
    assert "threads is 1,000,000, but the limit is 1,024" in ran.err
