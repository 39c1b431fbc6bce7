"""The character transformer: it sees the past only, and learns a text."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quorate
from quorate.tasks import charlm, files
from quorate.tasks.charlm import CharLm, CharNet, load_shakespeare, windows

TEXT = "abcab" * 200


def small_task(**options: Any) -> CharLm:
    return CharLm(**{"text": TEXT, "context": 8, "width": 16, "layers": 1, "heads": 2, "stride": 4} | options)


def test_windows_are_what_is_seen_and_what_comes_next() -> None:
    assert windows(torch.arange(10), 3, 2).tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]


def test_the_test_text_is_held_out() -> None:
    task = small_task(text="a" * 900 + "b" * 100, test_samples=None)
    (train,) = task.train_data().tensors
    assert set(train.flatten().tolist()) == {0}
    assert set(task._test.flatten().tolist()) == {1}


def test_scores_depend_on_the_past_alone() -> None:
    torch.manual_seed(0)
    net = CharNet(5, context=6, width=8, layers=2, heads=2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    letters = torch.randint(0, 5, (1, 6))
    before = net(letters)
    for place in range(6):
        changed = letters.clone()
        changed[0, place] = (changed[0, place] + 1) % 5
        differs = (net(changed) - before).abs().amax(2)[0] > 1e-6
        assert not differs[:place].any() and differs[place:].all()


def test_it_learns_a_text_that_repeats_itself() -> None:
    task = small_task(lr=0.01, updates=80)
    engine = quorate.Simulated(3, "shifted-exp:1,1")
    result = quorate.train(task, quorate.BackupSync(2, 1), engine, updates=80, evaluate_every=1)
    losses = [one.measures["test_loss"] for one in result.metrics.evaluations]
    assert losses[0] == pytest.approx(math.log(3), abs=0.2)
    assert losses[-1] < 0.35  # but for the first characters of a sample, the next one is certain
    assert result.evaluation["bits"] == pytest.approx(losses[-1] / math.log(2))


def test_it_runs_on_local_workers() -> None:
    result = quorate.train(small_task(), quorate.SoftSync(2), quorate.Local(2), updates=3)
    assert math.isfinite(result.evaluation["test_loss"])


def test_a_round_may_be_one_batch() -> None:
    result = quorate.train(small_task(), quorate.FullSync(), quorate.Simulated(3, together=True), updates=2)
    assert result.metrics.header["engine"]["arithmetic"].startswith("together")


def test_the_rate_rises_and_falls_to_a_tenth() -> None:
    task = small_task(updates=100)
    shares = [task.share_of_lr(version) for version in range(101)]
    assert shares[0] == pytest.approx(1 / 6) and max(shares) == shares[5] == 1.0 and shares[100] == pytest.approx(0.1)
    assert small_task().share_of_lr(10**6) == 1.0


def test_the_text_is_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_shakespeare.cache_clear()
    monkeypatch.setattr(charlm, "TINY_SHAKESPEARE", replace(charlm.TINY_SHAKESPEARE, sizes_bytes=(4,)))
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text("abcd")
    with pytest.raises(quorate.BadInput, match=r"has sha256 88d4266f.*, but tiny-shakespeare has 86c4.*; remove"):
        load_shakespeare(tmp_path)
    monkeypatch.setattr(charlm, "SHA256", "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589")
    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    assert load_shakespeare() == "abcd"
    load_shakespeare.cache_clear()


def test_the_real_text_where_it_is() -> None:
    if not (files.data_folder() / charlm.TINY_SHAKESPEARE.files[0]).exists():
        pytest.skip(f"tiny-shakespeare is not here; name the folder that has it in {files.VARIABLE}")
    text = load_shakespeare()
    assert text.startswith("First Citizen:") and len(set(text)) == 65


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"width": 9}, r"width is 9, but it must be a multiple of heads \(2\)"),
        ({"text": "abc"}, "the text has 3 characters, too few"),
        ({"stride": 0}, "stride is 0, but it must be at least 1"),
        ({"warm_up_share": 1.0}, "warm_up_share is 1.0"),
        ({"updates": 0}, "updates is 0, but it must be at least 1"),
    ],
)
def test_bad_input(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(quorate.BadInput, match=sentence):
        small_task(**options).model()


def test_a_ready_task() -> None:
    assert quorate.task.READY_TASKS["charlm"] == "quorate.tasks.charlm:CharLm"
