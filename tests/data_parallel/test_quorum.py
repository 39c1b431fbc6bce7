"""Backups and deadlines in real processes: what scripts see, and what becomes of their parameters.

All cases run in one launch (scripts/quorums.py), each with every version compared between the processes
(`check_every=1`), which would have ended the run. Who is late there is late on purpose, not by the clock.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.data_parallel.conftest import WORKERS, Quorums
from tests.data_parallel.scripts.quorums import BATCH, batch, loss_of, lr_at, net

pytestmark = pytest.mark.data_parallel

#: Worker 2 waits until it is late in every third of its iterations.
STRAGGLING = ["cancel", "finish", "deadline", "deadline-finish"]
ALL = [*STRAGGLING, "nan", "adaptive", "abandon", "uneven", "evaluate", "lending"]


def _receipts(seen: list[dict[str, Any]], worker: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = seen[worker]["receipts"]
    return found


@pytest.mark.parametrize("case", ALL)
def test_all_end_at_the_same_version_with_the_same_parameters(quorums: Quorums, case: str) -> None:
    seen = quorums.seen[case]
    assert len({one["version"] for one in seen}) == 1
    assert len({one["digest"] for one in seen}) == 1  # parameters and buffers
    assert seen[0]["version"] >= 6


@pytest.mark.parametrize("case", [*STRAGGLING, "nan", "adaptive", "abandon", "uneven", "evaluate"])
def test_the_parameters_are_those_of_a_plain_loop_over_what_was_applied(quorums: Quorums, case: str) -> None:
    """Version v + 1 is the mean of just the gradients that were applied, with the learning rate of version v."""
    seen = quorums.seen[case]
    torch.manual_seed(7)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for version in range(1, seen[0]["version"] + 1):
        numbers = [(worker, one["used"].get(str(version))) for worker, one in enumerate(seen)]
        losses = [loss_of(model, batch(worker, number)) for worker, number in numbers if number is not None]
        assert losses, f"nobody's gradient made version {version}"
        optimizer.param_groups[0]["lr"] = lr_at(version - 1)
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        found = torch.tensor(seen[1]["parameters"][name], dtype=torch.float64)
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", STRAGGLING)
def test_who_is_late_is_told_so(quorums: Quorums, case: str) -> None:
    receipts = _receipts(quorums.seen[case], 2)
    late = quorums.seen[case][2]["late"]
    assert len(late) > 2, "hardly anybody was late, so nothing was tried"
    for receipt in (receipts[number] for number in late):
        assert not receipt["applied"]
        assert receipt["over"] or receipt["reason"].startswith("late: version ")
        assert receipt["over"] or receipt["late_s"] > 0
        assert receipt["lost_samples"] == BATCH


@pytest.mark.parametrize("case", ALL)
def test_receipts_agree_with_each_other(quorums: Quorums, case: str) -> None:
    for worker in range(WORKERS):
        receipts = _receipts(quorums.seen[case], worker)
        versions = [receipt["version"] for receipt in receipts]
        assert versions == sorted(versions)
        applied = [receipt["version"] for receipt in receipts if receipt["applied"]]
        assert len(set(applied)) == len(applied)
        for receipt in receipts:
            assert receipt["reason"]
            assert receipt["staleness"] == 0  # a quorum is made of gradients of the newest version
            if receipt["applied"]:
                assert (receipt["late_s"], receipt["lost_samples"], receipt["over"]) == (0.0, 0, False)
        assert not any(receipt["over"] for receipt in receipts[:-1])  # nothing after the end


@pytest.mark.parametrize(("case", "quorum"), [("cancel", 2), ("finish", 2), ("nan", 3), ("abandon", 2), ("uneven", 2)])
def test_a_version_is_made_of_exactly_the_quorum(quorums: Quorums, case: str, quorum: int) -> None:
    seen = quorums.seen[case]
    for version in range(1, seen[0]["version"] + 1):
        members = [worker for worker, one in enumerate(seen) if str(version) in one["used"]]
        assert len(members) == quorum, f"version {version} was made by {members}"


def test_a_gradient_with_nan_is_refused_and_its_worker_goes_on(quorums: Quorums) -> None:
    receipts = _receipts(quorums.seen["nan"], 0)
    refused = [number for number, receipt in enumerate(receipts) if receipt["reason"] == "it held NaN or Inf"]
    assert refused == [5]
    assert receipts[5]["version"] == 5 and receipts[5]["lost_samples"] == BATCH
    assert receipts[6]["applied"] and receipts[6]["version"] == 6
    for values in quorums.seen["nan"][0]["parameters"].values():
        assert bool(torch.tensor(values).isfinite().all())


def test_a_late_iteration_is_abandoned_where_it_stands(quorums: Quorums) -> None:
    seen = quorums.seen["abandon"][2]
    late = seen["late"]
    assert len(late) > 2, "hardly anything was abandoned, so nothing was tried"
    assert not set(late) & set(seen["reached"])
    for number in late:
        assert not seen["receipts"][number]["applied"]


def test_uneven_numbers_of_batches_end_together(quorums: Quorums) -> None:
    seen = quorums.seen["uneven"]
    assert len(seen[0]["receipts"]) == 6 and len(seen[2]["receipts"]) == 9
    last = seen[1]["receipts"][-1]  # it had the most, and was left alone
    assert last["over"] and not last["applied"]
    assert len(seen[1]["receipts"]) < 14


def test_whoever_evaluates_sees_one_version_while_the_others_make_more(quorums: Quorums) -> None:
    seen = quorums.seen["evaluate"][1]
    assert len(set(seen["digests"])) == 1
    assert all(output == seen["outputs"][0] for output in seen["outputs"])
    assert seen["looked_at"] < seen["version"] - 2
    assert seen["receipts"][-1]["version"] > seen["looked_at"]  # and goes on from the newest


def test_with_a_sampler_each_sample_counts_once_in_each_epoch(quorums: Quorums) -> None:
    seen = quorums.seen["lending"]
    for epoch in range(2):
        samples = [sample for one in seen for sample in one["applied"][epoch]]
        assert sorted(samples) == list(range(62))
    dropped = [receipt for one in seen for receipt in one["receipts"] if not receipt["applied"]]
    assert dropped and all(receipt["lost_samples"] == 0 for receipt in dropped)
