"""What cannot work is refused in every process with one sentence that has a remedy; nobody hangs."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

import quorate
from quorate.data_parallel.process_group import _backend_for
from quorate.errors import BadInput
from tests.data_parallel.launching import Launcher

pytestmark = pytest.mark.data_parallel

WORKERS = 2
SAME = "build the same model, optimizer and policy in every process"
#: What all processes are told.
SENTENCES = {
    "async": "cannot run policy 'async'.*use the local, ray or simulated engine, or one of: adaptive, backup,",
    "softsync": "cannot run policy 'softsync'.*use the local, ray or simulated engine",
    "bounded": "cannot run policy 'bounded'.*use the local, ray or simulated engine",
    "k-batch": "cannot run policy 'k-batch'.*use the local, ray or simulated engine",
    "shape": r"^1\.weight is float32\[3, 3\] in process 0 but float32\[4, 3\] in process 1; " + SAME,
    "name": "^process 1 has weight where process 0 has scale; " + SAME,
    "number": r"^2\.weight is in process 0 but not in process 1; " + SAME,
    "type": r"^0\.weight is float32\[3, 3\] in process 0 but float64\[3, 3\] in process 1; " + SAME,
    "buffer": r"^mean is float32\[3\] in process 0 but float32\[4\] in process 1; " + SAME,
    "policy": r"^the policy is Delayed\(delay=0.* in process 0 but Delayed\(delay=1.* in process 1; " + SAME,
    "optimizer differs": "^the optimizer is SGD .* in process 0 but Adam .* in process 1; " + SAME,
    "quorum": "^quorum is 3, but the run has 2 workers.*lower it or add workers",
    "workers": r"^quorum 1 \+ backups 0 makes 1 workers, but the run has 2; give the engine \(or torchrun\) 1 workers",
    "optimizer of others": "^the optimizer has a parameter that is not the module's; make it of the parameters",
    "no optimizer": "^optimizer is a generator; make it before",
    "lbfgs": "^LBFGS computes several gradients in one step; use another optimizer",
    "frozen": "^the module has no parameter that needs a gradient",
    "check_every": "^check_every is 0, but it must be at least 1",
    "checkpoint_every": "^checkpoint_every is 0, but it must be at least 1",
    "clip_norm": "^clip_norm is -1.0, but it must be above 0",
    "bucket_bytes": "^bucket_bytes is -5, but it must be above 0",
    "patience": "^patience_s is -1.0, but it must be above 0",
}


@pytest.fixture(scope="module")
def refusals(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str] | None]]:
    """By worker and case, the error that was raised."""
    folder = tmp_path_factory.mktemp("refused")
    launch = launcher.launch("refused.py", WORKERS, folder, str(folder))
    assert launch.wait(100) == [0] * WORKERS, launch.text(0) + launch.text(1)
    return [json.loads((folder / f"refused{worker}.json").read_text()) for worker in range(WORKERS)]


def _matches(sentence: str, refusal: list[str] | None) -> None:
    assert refusal is not None, "it was taken"
    with pytest.raises(BadInput, match=sentence):
        raise {"BadInput": BadInput}.get(refusal[0], RuntimeError)(refusal[1])
    assert "\n" not in refusal[1]


@pytest.mark.parametrize("case", SENTENCES)
def test_every_process_gets_the_sentence(refusals: list[dict[str, list[str] | None]], case: str) -> None:
    for refused in refusals:
        _matches(SENTENCES[case], refused[case])


def test_a_trace_that_exists_is_worker_0s_to_refuse(refusals: list[dict[str, list[str] | None]]) -> None:
    _matches(r"already holds a run \(trace.jsonl\); name another, or move it away", refusals[0]["out"])


def test_a_sparse_gradient_is_refused_where_it_comes_up(refusals: list[dict[str, list[str] | None]]) -> None:
    errors = [refused["sparse"] for refused in refusals]
    assert all(error is not None for error in errors)
    told = [error for error in errors if error is not None and error[0] == "BadInput"]
    assert told, errors  # the other may hear first that this one has failed
    _matches("^a parameter has a sparse gradient, which no all-reduce can average; use sparse=False", told[0])
    for error in errors:
        assert error is not None and error[0] in ("BadInput", "ProcessLost")


def test_without_a_process_group_it_says_how_to_get_one() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(
        BadInput, match=r"^there is no process group; call torch.distributed.init_process_group.*torchrun"
    ):
        quorate.DataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("backend", "config", "sentence"),
    [
        ("nccl", "cuda:nccl", '^the process group uses NCCL.*the model is on the CPU; move the model.*"gloo"'),
        ("nccl", "cpu:nccl,cuda:nccl", "^the process group uses NCCL"),
        ("mpi", "cpu:mpi,cuda:mpi", "^the process group uses mpi; DataParallel works on gloo and NCCL"),
    ],
)
def test_a_backend_that_cannot_carry_the_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: str, config: str, sentence: str
) -> None:
    """There is no NCCL here, so what torch says of a group is made up."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    with pytest.raises(BadInput, match=sentence):
        _backend_for(None, torch.device("cpu"))


def test_a_group_of_both_backends_is_taken_for_either_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    assert _backend_for(None, torch.device("cpu")) == "gloo"
    assert _backend_for(None, torch.device("cuda")) == "nccl"
