"""What a DataParallel run saves comes back whole, on all processes, and nothing that does not fit gets in."""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from quorate.checkpoint import CheckpointFolder
from quorate.data_parallel.saving import Saver
from quorate.errors import BadInput
from tests.checkpoint.states import same

pytestmark = pytest.mark.data_parallel


class Script:
    """A small training script, with all that belongs to a version of it."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        width: int = 4,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))
        self.optimizer = optimizer(self.net.parameters(), lr=0.1)
        self.scheduler = schedules.MultiStepLR(self.optimizer, [2, 4])
        self.averaged = torch.optim.swa_utils.AveragedModel(self.net)
        also = options.pop("also", {"scheduler": self.scheduler, "averaged": self.averaged})
        self.saver = Saver(folder, self.net, self.optimizer, also, **options)

    def iteration(self, version: int) -> None:
        self.saver.take()
        loss = self.net(torch.randn(8, 3)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.saver.settle()
        self.optimizer.step()
        if self.saver.is_due(version):
            self.saver.reached(version, {"place": version})
        self.scheduler.step()
        self.averaged.update_parameters(self.net)

    def everything(self) -> list[Any]:
        things = (self.net, self.optimizer, self.scheduler, self.averaged)
        return [plain(thing.state_dict()) for thing in things]


def plain(value: Any) -> Any:
    """A copy in plain dicts, that no later step changes."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.detach().clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_script_goes_on_as_if_nothing_had_been(tmp_path: Path, optimizer: Any) -> None:
    """Parameters, buffers, momenta, schedule, average and dropout: five versions in one life or in two."""
    whole = Script(tmp_path / "whole", optimizer=optimizer)
    for version in range(1, 6):
        whole.iteration(version)
    whole.saver.close()

    first = Script(tmp_path / "cut", optimizer=optimizer)
    for version in range(1, 4):
        first.iteration(version)
    first.saver.close()
    second = Script(tmp_path / "cut", optimizer=optimizer, seed=7)
    loaded = second.saver.folder.load()
    assert loaded.version == 3
    assert second.saver.restore(loaded) == {"place": 3}
    assert isinstance(second.scheduler.milestones, Counter)
    for version in range(4, 6):
        second.iteration(version)
    second.saver.close()
    assert same(second.everything(), whole.everything())


def test_the_scheduler_is_saved_as_the_script_leaves_it_and_not_a_step_behind(tmp_path: Path) -> None:
    script = Script(tmp_path)
    for version in (1, 2):
        script.iteration(version)
    script.saver.close()
    loaded = script.saver.folder.load()
    assert loaded.state["also"]["scheduler"]["last_epoch"] == 2
    assert loaded.state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.01)  # after the milestone


def test_the_copy_is_of_its_version_whatever_happens_while_it_is_written(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.iteration(1)
    before = script.everything()
    script.saver.take()
    with torch.no_grad():
        for parameter in script.net.parameters():
            parameter.add_(1)
    script.saver.settle()
    loaded = script.saver.folder.load()
    assert same(loaded.state["model"], before[0])


def test_every_so_many_versions(tmp_path: Path) -> None:
    script = Script(tmp_path, every=3)
    for version in range(1, 9):
        script.iteration(version)
        script.saver.take()
        script.saver.settle()
        assert script.saver.folder.versions()[-1:] == ([version - version % 3] if version >= 3 else [])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: schedules.StepLR(optimizer, 2),
    "LambdaLR": lambda optimizer: schedules.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 9),
    "OneCycleLR": lambda optimizer: schedules.OneCycleLR(optimizer, 1.0, 10),
    "ReduceLROnPlateau": schedules.ReduceLROnPlateau,
    "SequentialLR": lambda optimizer: schedules.SequentialLR(
        optimizer, [schedules.LinearLR(optimizer), schedules.MultiStepLR(optimizer, [1, 2])], [2]
    ),
    "GradScaler": lambda optimizer: torch.amp.GradScaler("cpu", init_scale=8.0),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_and_scalers_of_torch_come_back(tmp_path: Path, name: str) -> None:
    def made() -> tuple[Any, Saver]:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        thing = SCHEDULERS[name](optimizer)
        return thing, Saver(tmp_path, net, optimizer, {"it": thing})

    one, saver = made()
    if name != "GradScaler":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stepped before the optimizer; SequentialLR says more
            for _ in range(3):
                one.step(1.0) if name == "ReduceLROnPlateau" else one.step()
    saver.save(1)
    saver.close()
    other, again = made()
    loaded = again.folder.load()
    again.restore(loaded)
    assert same(plain(other.state_dict()), plain(one.state_dict()))


# ------------------------------------------------------------ randomness of each process


def test_each_worker_goes_on_with_its_own_randomness(tmp_path: Path) -> None:
    scripts = [Script(tmp_path, seed=worker, worker=worker) for worker in range(3)]
    expected = {}
    for worker, script in enumerate(scripts):
        torch.manual_seed(worker)
        for version in range(1, 8):
            script.saver.reached(version)
            script.saver.take()
            script.saver.settle()
            drawn = torch.rand(4)
            expected[worker, version] = drawn
    assert scripts[0].saver.folder.versions() == [1, 6, 7]  # 1 was brought to disk
    assert len(list((tmp_path / "checkpoints" / "random").iterdir())) == 8
    loaded = scripts[0].saver.folder.load()
    assert loaded.version == 7
    for worker in range(3):
        again = Script(tmp_path, seed=50, worker=worker)
        again.saver.restore(loaded)
        assert torch.equal(torch.rand(4), expected[worker, 7])


def test_a_worker_that_died_before_it_saw_the_version_draws_again_what_it_drew_then(tmp_path: Path) -> None:
    writer, other = Script(tmp_path), Script(tmp_path, worker=1)
    drawn = []
    for version in (1, 2, 3):
        torch.manual_seed(version)
        other.saver.reached(version)  # which is enough: the next iteration may never begin
        drawn.append(torch.rand(3))
    for version, found in ((2, drawn[1]), (9, drawn[2])):
        writer.saver.save(version)
        writer.saver.close()
        loaded = writer.saver.folder.load()
        other.saver.restore(loaded)
        assert torch.equal(torch.rand(3), found)


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"version": 1}', b"\xff", "flipped"])
def test_randomness_that_cannot_be_read_is_left_as_it_is(tmp_path: Path, content: bytes | str | None) -> None:
    writer, other = Script(tmp_path), Script(tmp_path, worker=1)
    for script in (writer, other):
        script.saver.save(1)
        script.saver.close()
    file = tmp_path / "checkpoints" / "random" / "00001-00000001.json"
    if content is None:
        file.unlink()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        text = file.read_text()
        file.write_text(text.replace("A", "B", 1))
    loaded = other.saver.folder.load()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    other.saver.restore(loaded)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------ what does not fit


def saved_once(folder: Path, **options: Any) -> None:
    script = Script(folder, **options)
    script.iteration(1)
    script.saver.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"width": 5}, r"of another model: tensor '0.weight' has shape \(4, 3\) there, \(5, 3\) here"),
        ({"optimizer": torch.optim.SGD}, "made with the optimizer AdamW, but here it is SGD"),
        ({"also": {}}, "the checkpoint has '(scheduler|averaged)', which also= does not name"),
    ],
)
def test_a_checkpoint_of_something_else_changes_nothing(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    saved_once(tmp_path)
    other = Script(tmp_path, seed=1, **options)
    before, random = other.everything(), torch.get_rng_state()
    loaded = other.saver.folder.load()
    with pytest.raises(BadInput, match=sentence):
        other.saver.restore(loaded)
    assert same(other.everything(), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_what_also_names_newly_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    saved_once(tmp_path, also={})
    other = Script(tmp_path)
    loaded = other.saver.folder.load()
    with pytest.raises(BadInput, match=r"also= names '(scheduler|averaged)', which is not in the checkpoint"):
        other.saver.restore(loaded)


def test_other_parameter_groups_are_refused(tmp_path: Path) -> None:
    saved_once(tmp_path)

    def in_two(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=lr)

    other = Script(tmp_path, optimizer=in_two)
    loaded = other.saver.folder.load()
    with pytest.raises(BadInput, match="they have 6 parameters there, 1 and 5 here"):
        other.saver.restore(loaded)


def test_a_checkpoint_of_quorate_train_is_told_apart(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).save(3, {"protocol": {}, "engine": {}})
    script = Script(tmp_path)
    loaded = script.saver.folder.load()
    with pytest.raises(BadInput, match=r"version 3 .* has no model: it is not one of a DataParallel run"):
        script.saver.restore(loaded)


class Half:
    def state_dict(self) -> dict[str, Any]:
        return {}


class Odd(Half):
    def state_dict(self) -> dict[str, Any]:
        return {"when": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"every": 0}, "checkpoint_every is 0, but it must be at least 1"),
        ({"every": 1.5}, "checkpoint_every is 1.5, but it must be a whole number"),
        ({"also": [1]}, "also is a list, but it must name what else to save"),
        ({"also": {1: Half()}}, "also has the key 1, but its keys must be text"),
        ({"also": {"half": Half()}}, r"also\['half'\] is a Half, which has no load_state_dict\(\)"),
        ({"also": {"odd": Odd()}}, "also.odd.when is a set; it cannot be saved"),
    ],
)
def test_bad_input_is_a_sentence_at_once(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        Script(tmp_path, **options)


@pytest.mark.parametrize("folder", [None, "", 3])
def test_a_folder_must_have_a_name(folder: Any) -> None:
    with pytest.raises(BadInput, match="it must be the name of a folder"):
        Script(folder)


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(BadInput, match=r"cannot be written into '.*file/run' \(Not a directory\); give checkpoint="):
        Script(tmp_path / "file" / "run")
    Script(tmp_path / "file" / "run", worker=1)  # writes nothing that matters


# ------------------------------------------------------------ disks


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path)
    script.iteration(1)
    script.saver.take()
    script.saver.settle()
    real = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        monkeypatch.setattr(Path, "write_bytes", full)
        for version in (2, 3, 4):
            script.iteration(version)
        script.saver.close()
    (sentence,) = [str(one.message) for one in told]
    assert (
        "version 2 could not be written: No space left on device; training goes on, the last one is version 1"
        in sentence
    )
    monkeypatch.setattr(Path, "write_bytes", real)
    script.iteration(5)
    script.saver.close()
    assert script.saver.folder.versions()[-1] == 5


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    script = Script(tmp_path)
    for version in (1, 2):
        script.saver.save(version)
    script.saver.close()
    file = tmp_path / "checkpoints" / "00000002" / "tensors.safetensors"
    os.truncate(file, 100)
    loaded = script.saver.folder.load()
    assert re.fullmatch("checkpoint 00000002 is damaged .*; fell back to 00000001", *loaded.damaged)
    assert loaded.version == 1


def test_only_now_and_then_the_disk_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(os, "fsync", waited.append)
    seldom = Script(tmp_path / "seldom", durable_every_s=3600.0).saver
    for version in range(1, 5):
        seldom.save(version)
        seldom.settle()
        assert len(waited) > 0 if version == 1 else not waited
        waited.clear()
    always = Script(tmp_path / "always", durable_every_s=0.0).saver
    for version in range(1, 3):
        always.save(version)
        always.settle()
        assert waited
        waited.clear()


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    script = Script(tmp_path / "new")
    assert not script.saver.folder.versions()
    script.saver.close()  # nothing was reached
    assert script.saver.folder.versions() == []
    shutil.rmtree(tmp_path / "new")
    assert not script.saver.folder.versions()


# ------------------------------------------------------------ where a quorum is enough


class Shadowed:
    """A plane that makes versions on a copy, while the script is late."""

    def __init__(self, net: nn.Module) -> None:
        self.on_version: list[Any] = []
        self._newest = {one: torch.full_like(one, 7.0) for one in net.parameters()}
        self._buffers = {one: torch.full_like(one, 3) for one in net.buffers()}

    def newest(self) -> dict[Tensor, Tensor]:
        return self._newest

    def newest_buffers(self) -> dict[Tensor, Tensor]:
        return self._buffers


def test_versions_are_saved_where_they_are_made_though_the_script_is_late(tmp_path: Path) -> None:
    script = Script(tmp_path, every=2)
    plane: Any = Shadowed(script.net)
    script.saver.follow(plane, lambda version: {"place": version})
    before = script.everything()
    for version in (1, 2, 3, 4, 5):
        for told in plane.on_version:
            told(version, 0.5)
    script.saver.reached(5)  # the script's own iterations save nothing
    assert not script.saver.is_waiting
    script.saver.settle()
    loaded = script.saver.folder.load()
    assert loaded.version == 4
    names = {name for name, _ in script.net.named_parameters()}
    assert {float(loaded.state["model"][name].unique()) for name in names} == {7.0}
    assert {float(one.unique()) for name, one in loaded.state["model"].items() if name not in names} == {3.0}
    assert same(script.everything(), before)
    assert script.saver.restore(loaded) == {"place": 4}


def test_others_than_worker_0_follow_nobody(tmp_path: Path) -> None:
    script = Script(tmp_path, worker=2)
    plane: Any = Shadowed(script.net)
    script.saver.follow(plane, lambda version: {})
    assert plane.on_version == []
    script.saver.reached(1)
    assert (tmp_path / "checkpoints" / "random" / "00002-00000001.json").exists()
