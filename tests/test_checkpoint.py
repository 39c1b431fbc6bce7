"""Checkpoints come back as they were, or the one before does: after kills, full disks, and bytes gone bad."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from quorate.checkpoint import (
    CHECKPOINTS,
    BackgroundWriter,
    CheckpointFolder,
    Damaged,
    check_can_save,
    check_same_tensors,
    state_in,
)
from quorate.errors import BadInput

FILES = ["tensors.safetensors", "state.json", "manifest.json"]


def same(one: Any, other: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (one == other and str(one) == str(other))
    return bool(one == other)


def bits(tensor: Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).tolist()


def some_state(number: int) -> dict[str, Any]:
    return {
        "learner": {"model": {"weight": torch.full((4, 3), float(number)), "steps": torch.tensor(number)}},
        "policy": {"pairs": [(number, 0.5)], 3: None},
    }


def temporary_folders(folder: CheckpointFolder) -> list[str]:
    return [entry.name for entry in folder.folder.iterdir() if entry.name.startswith(".")]


def made(run: Path, *versions: int) -> CheckpointFolder:
    folder = CheckpointFolder(run)
    for version in versions:
        folder.save(version, some_state(version))
    return folder


@contextmanager
def short_lived() -> Iterator[Path]:
    """A folder for one example of Hypothesis, since fixtures last for all; and hundreds need not wait for the disk."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield Path(name)


# ------------------------------------------------------------ round trip

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool),
    *(torch.complex64, torch.complex128),
]
VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: tensor.t() if tensor.dim() == 2 else tensor,
    lambda tensor: tensor[1:] if tensor.dim() else tensor,
    lambda tensor: tensor[::2] if tensor.dim() else tensor,
    lambda tensor: tensor.expand(3, *tensor.shape),
    lambda tensor: tensor.conj(),
    lambda tensor: tensor.requires_grad_() if tensor.dtype in (torch.float32, torch.complex64) else tensor,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Random bits of any type, so that NaN, infinity and subnormal numbers are among them."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    highest = 2 if dtype == torch.bool else 256
    content = torch.randint(0, highest, (count,), dtype=torch.uint8, generator=random)
    return draw(st.sampled_from(VIEWS))(content.view(dtype).reshape(shape))


anything_unicode = st.text(st.characters(exclude_categories=()))
keys = anything_unicode | st.integers()
leaves = st.none() | st.booleans() | st.integers() | st.floats() | anything_unicode | tensors()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@given(state=st.dictionaries(keys, values))
@example(state={})
@example(state={"odd strides": [torch.ones(size, dtype=torch.complex64)[::2] for size in (0, 2, 4)]})
@example(state={"huge": 10**5000, 10**5000: -(2**64), "half a pair": "\ud83d\ude00", "zero": -0.0})
@example(
    state={"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "__metadata__": torch.ones(2), "\udcff": torch.ones(3)}
)
@example(state={"pairs": [["tensor", "0 a"]], "tensor": {"int": "0x1", "float": "nan", "tuple": [1]}})
def test_every_state_comes_back_equal(state: dict[str, Any]) -> None:
    with short_lived() as run:
        folder = CheckpointFolder(run)
        check_can_save(state)
        assert folder.save(7, state) == run / CHECKPOINTS / "00000007"
        loaded = folder.load()
        assert (loaded.version, loaded.damaged) == (7, ())
        assert same(loaded.state, state)
        for file in FILES[1:]:
            text = (folder.folder / "00000007" / file).read_bytes().decode("utf-8", "surrogatepass")
            json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_tensors_that_share_memory_come_back_apart(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    state = {
        "whole": whole,
        "again": whole,
        "rows": list(whole.view(3, 4)),
        "complex": torch.view_as_complex(whole.view(6, 2)),
    }
    folder = CheckpointFolder(tmp_path)
    folder.save(1, state)
    back = folder.load().state
    assert same(back, state)
    back["whole"].zero_()
    assert back["again"].sum() == back["rows"][0].sum() + back["rows"][1].sum() + back["rows"][2].sum() == 66


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_come_back_in_main_memory(tmp_path: Path) -> None:
    state = {"weight": torch.arange(6.0).view(2, 3).t()}
    CheckpointFolder(tmp_path).save(1, {"weight": state["weight"].cuda()})
    assert same(CheckpointFolder(tmp_path).load().state, state)


class Pair(NamedTuple):
    one: int


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: 0, "function"),
        ({1}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (deque([1]), "deque"),
        (Pair(1), "Pair"),
        (Counter([1]), "Counter"),
        (OrderedDict(), "OrderedDict"),
        (torch.float32, "dtype"),
        (nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.eye(2).to_sparse(), "Tensor of the kind sparse_coo"),
        (torch.empty(2, device="meta"), "Tensor of the kind meta"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_place(tmp_path: Path, value: object, kind: str) -> None:
    state = {"learner": {"groups": [0, ({7: {"lambda": value}},)]}}
    sentence = f"learner.groups[1][0].7.lambda is a {kind}; it cannot be saved in a checkpoint, which holds dicts,"
    for attempt in (check_can_save, lambda state: CheckpointFolder(tmp_path).save(1, state)):
        with pytest.raises(BadInput) as refused:
            attempt(state)
        assert str(refused.value).startswith(sentence)
    assert list(tmp_path.iterdir()) == []


def test_keys_and_shapes_that_cannot_be_saved() -> None:
    with pytest.raises(BadInput, match=r"^a\.b has the key True, a bool; it cannot be saved"):
        check_can_save({"a": {"b": {True: 1}}})
    with pytest.raises(BadInput, match=r"^the state has the key \(1, 2\), a tuple; it cannot"):
        check_can_save({(1, 2): 1})  # type: ignore[dict-item]
    with pytest.raises(BadInput, match="is a list, but it must be a dict"):
        check_can_save([])  # type: ignore[arg-type]
    endless: dict[str, Any] = {}
    endless["again"] = [endless, endless]
    with pytest.raises(BadInput, match=r"^again\[0\]\.again.* is nested deeper than 100 levels"):
        check_can_save(endless)
    with pytest.raises(BadInput, match="version is -1, but it must be at least 0"):
        CheckpointFolder(Path("nowhere")).save(-1, {})


def test_the_first_tensor_that_differs_is_named() -> None:
    here = {"0.weight": torch.zeros(32, 6), "0.bias": torch.zeros(32)}
    check_same_tensors(here, {name: tensor + 1 for name, tensor in here.items()}, "model")

    def sentence(**changes: Tensor | None) -> str:
        there = {name: changes.get(name[2:], tensor) for name, tensor in here.items()}
        there |= {name: tensor for name, tensor in changes.items() if name == "more"}
        with pytest.raises(BadInput) as refused:
            check_same_tensors(here, {name: tensor for name, tensor in there.items() if tensor is not None}, "model")
        return str(refused.value).removeprefix("the checkpoint is of another model: tensor ")

    assert sentence(weight=torch.zeros(16, 6), bias=None) == "'0.weight' has shape (16, 6) there, (32, 6) here"
    assert sentence(bias=torch.zeros(32).double()) == "'0.bias' has type torch.float64 there, torch.float32 here"
    assert sentence(bias=None) == "'0.bias' is missing there"
    assert sentence(more=torch.zeros(1)) == "'more' is there, but not here"


# ------------------------------------------------------------ the folder


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "not" / "there" / "yet")
    assert folder.versions() == []
    for version, left in [(0, [0]), (9, [0, 9]), (10, [9, 10]), (10**8, [10, 10**8]), (10**9, [10**8, 10**9])]:
        folder.save(version, some_state(version))
        assert folder.versions() == left
        assert sorted(entry.name for entry in folder.folder.iterdir()) == sorted(f"{one:08d}" for one in left)
        assert (folder.load().version, folder.load().damaged) == (version, ())
        assert same(folder.load().state, some_state(version))


def test_a_run_that_went_back_leaves_no_higher_version(tmp_path: Path) -> None:
    folder = made(tmp_path, 100, 123)
    flip(folder.folder / "00000123" / "state.json", 5)
    assert folder.load().version == 100
    folder.save(110, some_state(110))
    assert folder.versions() == [100, 110]
    assert folder.load().version == 110


def test_the_same_version_again_replaces_the_old_one(tmp_path: Path) -> None:
    folder = made(tmp_path, 4, 5)
    folder.save(5, some_state(55))
    assert folder.versions() == [4, 5]
    assert same(folder.load().state, some_state(55))
    assert temporary_folders(folder) == []


def test_what_else_lies_in_the_folder_is_no_checkpoint(tmp_path: Path) -> None:
    folder = made(tmp_path, 3)
    for name in ("7", "000000007", "0000000x", "-0000001", ".replaced-9-1", ".writing-00000009-1", "٠٠٠٠٠٠٠٩"):
        (folder.folder / name).mkdir()
    (folder.folder / "00000009").write_text("a file")
    assert folder.versions() == [3]
    assert folder.load().version == 3


def test_sweep_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path).sweep()
    folder = made(tmp_path, 3, 4)
    for name in (
        ".writing-00000005-77",
        ".removing-00000001-77",
        ".replaced-00000004-77",
        ".removing-.replaced-00000004-7-7",
    ):
        (folder.folder / name).mkdir()
        (folder.folder / name / "state.json").write_text("{}")
    (folder.folder / "00000003").rename(folder.folder / ".replaced-00000003-77")  # nothing took its place
    assert folder.versions() == [3, 4]
    folder.sweep()
    assert sorted(entry.name for entry in folder.folder.iterdir()) == ["00000003", "00000004"]
    assert same(folder.load().state, some_state(4))


def test_leftovers_of_a_process_with_the_same_number_are_no_obstacle(tmp_path: Path) -> None:
    """In a container the training process may have the same number at each start."""
    folder = made(tmp_path, 3, 4)
    for name in (
        "writing-00000005",
        "removing-00000003",
        "removing-00000004",
        "replaced-00000004",
        "replaced-00000005",
    ):
        shutil.copytree(folder.folder / "00000003", folder.folder / f".{name}-{os.getpid()}")
    folder.save(5, some_state(5))
    assert same(folder.load().state, some_state(5))
    shutil.copytree(folder.folder / "00000004", folder.folder / f".replaced-00000005-{os.getpid()}")
    folder.save(5, some_state(55))
    assert same(folder.load().state, some_state(55))
    assert folder.versions() == [4, 5]
    assert not (folder.folder / "00000003").exists()


def test_all_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can cut the power; this one checks the order that a power cut asks for."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        content = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else path.stat().st_size
        steps.append(f"{path.relative_to(tmp_path)} {content}")

    def noted_replace(old: Path, new: Path) -> None:
        replace(old, new)
        steps.append(f"{old.name} becomes {new.name}")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "getpid", lambda: 77)
    saved = made(tmp_path / "run", 1).folder / "00000001"
    sizes = {name: (saved / name).stat().st_size for name in FILES}
    writing = "run/checkpoints/.writing-00000001-77"
    assert steps == [
        "run ['checkpoints']",
        f"{writing}/state.json {sizes['state.json']}",
        f"{writing}/tensors.safetensors {sizes['tensors.safetensors']}",
        f"{writing}/manifest.json {sizes['manifest.json']}",
        f"{writing} {sorted(FILES)}",
        ".writing-00000001-77 becomes 00000001",
        "run/checkpoints ['00000001']",
    ]
    made(tmp_path / "run", 2)
    steps.clear()
    made(tmp_path / "run", 3)
    assert steps[-2:] == [
        "run/checkpoints ['00000001', '00000002', '00000003']",
        "00000001 becomes .removing-00000001-77",
    ]


def test_all_files_have_the_mode_that_umask_asks_for(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        saved = made(tmp_path, 1).folder / "00000001"
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in saved.iterdir()} == dict.fromkeys(FILES, "0o640")


@pytest.mark.parametrize("module", ["safetensors", "numpy"])
def test_a_missing_library_gives_the_line_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    folder = made(tmp_path, 1)
    for name in [name for name in sys.modules if name.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    sentence = f"checkpoints need {module}, which is not installed; type: pip install {module}"
    with pytest.raises(BadInput, match=sentence):
        folder.save(2, {})
    with pytest.raises(BadInput, match=sentence):
        folder.load()
    assert folder.versions() == [1] and temporary_folders(folder) == []


# ------------------------------------------------------------ damage


def flip(file: Path, position: int, bit: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= bit
    file.write_bytes(content)


def remade_manifest(checkpoint: Path) -> None:
    """Checksums that fit: what only someone who wants to do harm would write."""
    from quorate.checkpoint import _manifest

    (checkpoint / "manifest.json").write_bytes(_manifest(checkpoint, int(checkpoint.name)))


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, file: str) -> None:
    folder = made(tmp_path, 100, 123)
    damaged = folder.folder / "00000123" / file
    content = damaged.read_bytes()
    for position in range(len(content)):
        flip(damaged, position)
        loaded = folder.load()
        assert loaded.version == 100, f"byte {position} of {file}"
        assert same(loaded.state, some_state(100))
        (sentence,) = loaded.damaged
        assert sentence.startswith("checkpoint 00000123 is damaged (")
        assert sentence.endswith("); fell back to 00000100")
        if file != "manifest.json":
            assert f"({file}: its checksum differs)" in sentence
        damaged.write_bytes(content)
    assert folder.load().version == 123


@pytest.mark.parametrize("file", FILES)
def test_a_torn_or_missing_file_is_found(tmp_path: Path, file: str) -> None:
    folder = made(tmp_path, 100, 123)
    damaged = folder.folder / "00000123" / file
    content = damaged.read_bytes()
    for length in {0, 1, 7, 8, 9, len(content) // 2, len(content) - 1}:
        damaged.write_bytes(content[:length])
        assert folder.load().version == 100
    damaged.write_bytes(content + b" ")
    if file != "manifest.json":
        assert folder.load().damaged == (
            f"checkpoint 00000123 is damaged ({file}: it has {len(content) + 1} bytes instead of {len(content)}); "
            "fell back to 00000100",
        )
    damaged.unlink()
    missing = f"checkpoint 00000123 is damaged ({file}: it is missing); fell back to 00000100"
    assert folder.load().damaged == (missing,)
    damaged.mkdir()
    assert folder.load().damaged == (missing,)
    damaged.rmdir()
    os.mkfifo(damaged)  # to open it would wait for ever
    assert folder.load().damaged == (missing,)


def test_a_file_that_cannot_be_read_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, 100, 123)
    read_bytes = Path.read_bytes

    def bad_sector(path: Path) -> bytes:
        if path.parent.name == "00000123" and path.name == "state.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", bad_sector)
    assert "(state.json: Input/output error); fell back to 00000100" in folder.load().damaged[0]


def test_without_a_sound_one_the_folder_and_every_fault_are_named(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(BadInput, match=rf"^the folder '{tmp_path}/checkpoints' holds no checkpoint$"):
        folder.load()
    made(tmp_path, 100, 123)
    flip(folder.folder / "00000123" / "tensors.safetensors", 20)
    (folder.folder / "00000100" / "manifest.json").write_text("[]")
    with pytest.raises(BadInput) as refused:
        folder.load()
    assert str(refused.value) == (
        f"the folder '{tmp_path}/checkpoints' holds no sound checkpoint: "
        "checkpoint 00000123 is damaged (tensors.safetensors: its checksum differs); "
        "checkpoint 00000100 is damaged (manifest.json: it cannot be understood (TypeError))"
    )


def test_a_checkpoint_under_a_wrong_name_is_damaged(tmp_path: Path) -> None:
    folder = made(tmp_path, 100)
    shutil.copytree(folder.folder / "00000100", folder.folder / "00000200")
    loaded = folder.load()
    assert loaded.version == 100
    assert "00000200 is damaged (manifest.json: it is of another version)" in loaded.damaged[0]


def test_a_newer_schema_is_refused_rather_than_passed_over(tmp_path: Path) -> None:
    folder = made(tmp_path, 100, 123)
    manifest = folder.folder / "00000123" / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"schema": 2, "files": "in another way"}))
    with pytest.raises(BadInput, match=r"00000123' is of schema 2, but .* reads only 1; use the release that wrote it"):
        folder.load()
    for schema in (0, True, 1.0, "1", None, -5):
        manifest.write_text(json.dumps(content | {"schema": schema}))
        assert folder.load().version == 100


def outcome(folder: CheckpointFolder) -> str:
    """The promise for bytes of any kind: an older checkpoint or a sentence, but no other exception."""
    try:
        return f"version {folder.load().version}"
    except BadInput:
        return "refused"


words = st.sampled_from(["pairs", "tuple", "tensor", "int", "float", "dtype", "shape", "0 weight", "complex64", "nn"])
hostile_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, to be copied and spoilt."""
    run = tmp_path_factory.mktemp("template") / "run"
    made(run, 100).save(123, {"weight": torch.ones(2, 3), "half": torch.ones(2, dtype=torch.complex64)})
    return run


@given(file=st.sampled_from(FILES), content=st.binary() | hostile_json.map(lambda value: json.dumps(value).encode()))
@example(file="manifest.json", content=b"[" * 100_000)
@example(file="manifest.json", content=b'{"schema": ' + b"9" * 5000 + b"}")
@example(file="manifest.json", content=b'{"schema": 1, "version": 123, "files": {"state.json": []}}')
def test_bytes_of_any_kind_are_passed_over(template: Path, file: str, content: bytes) -> None:
    with short_lived() as place:
        run = shutil.copytree(template, place / "run")
        (run / CHECKPOINTS / "00000123" / file).write_bytes(content)
        assert outcome(CheckpointFolder(run)) in ("version 100", "refused")


@given(
    file=st.sampled_from(FILES[:2]),
    content=st.binary() | hostile_json.map(lambda value: json.dumps({"pairs": [["a", value]]}).encode()),
)
def test_bytes_of_any_kind_do_no_harm_even_with_checksums_that_fit(template: Path, file: str, content: bytes) -> None:
    with short_lived() as place:
        run = shutil.copytree(template, place / "run")
        (run / CHECKPOINTS / "00000123" / file).write_bytes(content)
        remade_manifest(run / CHECKPOINTS / "00000123")
        assert outcome(CheckpointFolder(run)) in ("version 100", "version 123")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.json", b'{"pairs": [["a", ' + b"[" * 100_000),
        ("state.json", b'["a list"]'),
        ("state.json", b'{"pairs": [[{"tuple": []}, 1]]}'),
        ("state.json", b'{"pairs": [["a", {"float": [1]}]]}'),
        ("state.json", b'{"pairs": [["a", {"set": [1]}]]}'),
        ("state.json", b'{"pairs": [["a", {"tuple": [1], "int": "0x1"}]]}'),
        ("state.json", b'{"pairs": [["a", {"tensor": "no such"}]]}'),
        ("state.json", b'{"pairs": [["a", {"tensor": "0 weight", "dtype": "nn", "shape": [1]}]]}'),
        ("state.json", b'{"pairs": [["a", {"tensor": "0 weight", "dtype": "int8", "shape": [-7, 99]}]]}'),
        ("tensors.safetensors", b"\xff" * 8 + b"{}"),
        ("tensors.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
    ],
    ids=range(11),
)
def test_contents_that_quorate_cannot_have_written(template: Path, tmp_path: Path, file: str, content: bytes) -> None:
    run = shutil.copytree(template, tmp_path / "run")
    (run / CHECKPOINTS / "00000123" / file).write_bytes(content)
    remade_manifest(run / CHECKPOINTS / "00000123")
    (sentence,) = CheckpointFolder(run).load().damaged
    assert "it cannot be understood" in sentence


@given(data=st.data())
def test_a_header_of_tensors_that_lies_does_no_harm(template: Path, data: st.DataObject) -> None:
    with short_lived() as place:
        run = shutil.copytree(template, place / "run")
        tensors = run / CHECKPOINTS / "00000123" / "tensors.safetensors"
        for _ in range(data.draw(st.integers(1, 3))):
            flip(tensors, data.draw(st.integers(0, tensors.stat().st_size - 1)), data.draw(st.integers(1, 255)))
        remade_manifest(tensors.parent)
        assert outcome(CheckpointFolder(run)) in ("version 100", "version 123")


# ------------------------------------------------------------ a disk that refuses


class Disk:
    """Makes the calls that write fail with "No space left": one of them, or that one and all later ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int, *, for_good: bool) -> None:
        self.calls: list[str] = []
        self.failing, self.for_good = failing, for_good
        import safetensors.torch

        for owner, name in [
            *((os, "mkdir"), (os, "fsync"), (os, "replace"), (Path, "write_bytes")),
            (safetensors.torch, "save_file"),
        ]:
            monkeypatch.setattr(owner, name, self.spoilt(name, getattr(owner, name)))

    def spoilt(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            here = len(self.calls) - 1
            if here == self.failing or (self.for_good and here > self.failing):
                if name == "write_bytes":  # half of it fits
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                if name == "save_file":
                    arguments[1].write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return call


def fault_of(work: Callable[[], object]) -> OSError | None:
    try:
        work()
    except OSError as fault:
        return fault
    return None


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("version", [4, 5])  # 5 replaces the newest
def test_a_failure_at_any_step_leaves_the_old_checkpoint(tmp_path: Path, version: int, for_good: bool) -> None:
    folder = made(tmp_path, 2, version - 1 if version == 4 else 5)
    old = folder.load()
    failures = []
    for failing in range(100):
        with pytest.MonkeyPatch.context() as patched:
            disk = Disk(patched, failing, for_good=for_good)
            fault = fault_of(lambda: folder.save(version, some_state(44)))
        if fault is None:
            break
        assert fault.errno == errno.ENOSPC
        failures.append(disk.calls[failing])
        if not for_good or "replace" not in disk.calls:
            assert temporary_folders(folder) == []
        loaded = folder.load()
        assert loaded.damaged == ()
        # When the disk fails for good just as the new one has its name, the name cannot be taken back.
        undone = loaded.version == old.version and same(loaded.state, old.state)
        assert undone or (for_good and failures[-1] == "fsync" and same(loaded.state, some_state(44)))
        folder.sweep()
        assert temporary_folders(folder) == []
        assert same(folder.load().state, loaded.state)
        if undone:
            assert folder.versions() == [2, old.version]
    assert {"mkdir", "write_bytes", "save_file", "fsync", "replace"} <= set(failures)
    # What fails now is only the removal of an old one, and that is no failure of the new one.
    assert same(folder.load().state, some_state(44))
    folder.sweep()
    assert temporary_folders(folder) == []


FULL_DISK = """
import json, os, sys
from pathlib import Path
import torch
from quorate.checkpoint import BackgroundWriter, CheckpointFolder
folder = CheckpointFolder(Path(sys.argv[1]))
report = {"sentences": [], "errors": [], "versions": []}
folder.save(1, {"weight": torch.ones(100)})
for state in ({"weight": torch.ones(1_000_000)}, {"text": "x" * 3_000_000}):
    try:
        folder.save(2, state)
    except OSError as fault:
        report["errors"].append(fault.errno)
    writer = BackgroundWriter(folder, report["sentences"].append, report["versions"].append)
    writer.submit(2, state)
    writer.finish()
    assert folder.load().version == 1 and folder.load().state["weight"].sum() == 100
report["left"] = sorted(os.listdir(folder.folder))
writer.submit(3, {"small": "again"})
writer.finish()
report["newest"] = folder.load().version
print(json.dumps(report))
"""
IN_A_TINY_FILE_SYSTEM = 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; exec "$2" -W error -c "$3" "$1"'


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root can mount a tiny file system")
    command = ["unshare", "-m", "sh", "-c", IN_A_TINY_FILE_SYSTEM, "sh", str(tmp_path), sys.executable, FULL_DISK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this machine does not let root mount a tiny file system")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "errors": [errno.ENOSPC] * 2,
        "sentences": [
            "checkpoint of version 2 could not be written: No space left on device; "
            "training goes on, the last one is version 1"
        ]
        * 2,
        "left": ["00000001"],
        "versions": [3],
        "newest": 3,
    }


# ------------------------------------------------------------ a process that is killed

KILLED = """
import json, os, shutil, signal, sys
from pathlib import Path
import safetensors.torch
import torch
from quorate.checkpoint import CheckpointFolder
torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # a kill, unlike a power cut, takes nothing from the kernel; so do not wait

place, version, state = Path(sys.argv[1]), int(sys.argv[2]), {"weight": torch.full((50,), 2.0), "new": (True,)}
STEPS = [(os, "mkdir"), (os, "fsync"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "chmod"),
         (Path, "write_bytes"), (safetensors.torch, "save_file")]

def save_and_die(run, fatal, moment):
    calls = []
    def deadly(name, real):
        def call(*arguments, **options):
            number = len(calls)
            calls.append(name)
            if number != fatal:
                return real(*arguments, **options)
            if moment == "after":
                real(*arguments, **options)
            if moment == "amid" and name == "write_bytes":
                real(arguments[0], arguments[1][:len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call
    for owner, name in STEPS:
        setattr(owner, name, deadly(name, getattr(owner, name)))
    CheckpointFolder(run).save(version, state)
    return calls

def in_a_child(work):
    child = os.fork()  # not a process each: they would all import torch
    if child == 0:
        try:
            work()
        finally:
            os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

reading, writing = os.pipe()
shutil.copytree(place / "template", place / "all")
in_a_child(lambda: os.write(writing, json.dumps(save_and_die(place / "all", None, None)).encode()))
steps = json.loads(os.read(reading, 100_000))
report = []
for number, step in enumerate(steps):
    for moment in ("before", "amid", "after") if step == "write_bytes" else ("before", "after"):
        run = place / f"{number}-{step}-{moment}"
        shutil.copytree(place / "template", run)
        report.append([run.name, in_a_child(lambda: save_and_die(run, number, moment))])
print(json.dumps(report))
"""


@pytest.mark.parametrize(("existing", "version"), [([2, 3], 4), ([3], 3)], ids=["next", "replaced"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_one_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: list[int], version: int
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    old, new = made(tmp_path / "template", *existing).load(), {"weight": torch.full((50,), 2.0), "new": (True,)}
    command = [sys.executable, "-W", "error", "-c", KILLED, str(tmp_path), str(version)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    deaths = json.loads(done.stdout)
    outcomes = []
    for name, status in deaths:
        assert status == -signal.SIGKILL, name
        folder = CheckpointFolder(tmp_path / name)
        loaded = folder.load()
        assert loaded.damaged == ()
        is_old = loaded.version == old.version and same(loaded.state, old.state)
        is_new = loaded.version == version and same(loaded.state, new)
        assert is_old != is_new, name
        outcomes.append("old" if is_old else "new")
        again = shutil.copytree(tmp_path / name, tmp_path / f"{name}-again")
        folder.sweep()
        assert temporary_folders(folder) == [], name
        assert same(folder.load().state, loaded.state), name
        unswept = CheckpointFolder(again)
        unswept.save(version, some_state(9))
        assert same(unswept.load().state, some_state(9)), name
    changes = outcomes.index("new")
    assert outcomes == ["old"] * changes + ["new"] * (len(outcomes) - changes)
    assert deaths[changes][0].endswith("-replace-after")
    steps = {name.split("-")[1] for name, _ in deaths}
    assert steps == {"mkdir", "write_bytes", "save_file", "chmod", "fsync", "replace", "unlink", "rmdir"}


# ------------------------------------------------------------ in the background


class SlowFolder(CheckpointFolder):
    """Saves only when told to; with a fault, if there is one."""

    def __init__(self, run: Path, fault: BaseException | None = None) -> None:
        super().__init__(run)
        self.go = threading.Event()
        self.fault = fault

    def save(self, version: int, state: dict[str, Any]) -> Path:
        assert self.go.wait(60)
        if self.fault is not None:
            raise self.fault
        return super().save(version, state)


def unexpected(sentence: str) -> None:
    raise AssertionError(sentence)


def test_the_writer_is_busy_until_the_checkpoint_is_on_disk(tmp_path: Path) -> None:
    folder, saved = SlowFolder(tmp_path), []
    writer = BackgroundWriter(folder, unexpected, saved.append)
    assert not writer.busy
    writer.submit(1, some_state(1))
    assert writer.busy and saved == []
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "checkpoint writer"]
    assert not thread.daemon
    with pytest.raises(AssertionError, match="one checkpoint at a time"):
        writer.submit(2, some_state(2))
    folder.go.set()
    writer.finish()
    writer.finish()
    assert not writer.busy and not thread.is_alive() and saved == [1]
    writer.submit(2, some_state(2))
    while writer.busy:
        thread.join(0.01)
    writer.submit(3, some_state(3))  # without a finish between
    writer.finish()
    assert saved == [1, 2, 3]
    assert same(folder.load().state, some_state(3))


def test_a_disk_that_refuses_is_a_sentence_and_training_goes_on(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    folder, sentences = SlowFolder(tmp_path, full), []
    folder.go.set()
    writer = BackgroundWriter(folder, sentences.append, lambda version: unexpected(f"saved {version}"))
    writer.submit(7, {})
    writer.finish()
    made(tmp_path, 100)
    writer.submit(123, {})
    writer.finish()
    assert sentences == [
        "checkpoint of version 7 could not be written: No space left on device; training goes on, "
        "there is none before it",
        "checkpoint of version 123 could not be written: No space left on device; training goes on, "
        "the last one is version 100",
    ]


def test_any_other_fault_surfaces_once(tmp_path: Path) -> None:
    writer = BackgroundWriter(CheckpointFolder(tmp_path), unexpected)
    writer.submit(1, {"bad": {1, 2}})
    with pytest.raises(BadInput, match="bad is a set"):
        writer.finish()
    writer.finish()
    writer.submit(1, {"bad": {1, 2}})
    while writer.busy:
        threading.Event().wait(0.01)
    with pytest.raises(BadInput, match="bad is a set"):
        writer.submit(2, {})
    assert not writer.busy and CheckpointFolder(tmp_path).versions() == []
    writer = BackgroundWriter(CheckpointFolder(tmp_path), unexpected, lambda version: unexpected("no one listens"))
    writer.submit(3, {})
    with pytest.raises(AssertionError, match="no one listens"):
        writer.finish()


# ------------------------------------------------------------ left to the kernel


def test_what_is_left_to_the_kernel_waits_for_no_disk_and_a_durable_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path, 1, 2)
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("it waited for the disk"))
    for version in (3, 4, 5):
        folder.save(version, some_state(version), durable=False)
    assert folder.versions() == [2, 4, 5]
    assert same(folder.load().state, some_state(5))
    monkeypatch.undo()
    folder.save(6, some_state(6))
    assert folder.versions() == [5, 6]
    folder.save(4, some_state(4), durable=False)  # the run went back: what stays must not be newer
    assert folder.versions() == [4]


def test_the_files_of_one_can_be_sent_elsewhere(tmp_path: Path) -> None:
    folder = made(tmp_path, 1, 2)
    assert same(state_in(folder.content(1)), some_state(1))
    tensors = folder.folder / "00000002" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"tensors\.safetensors: it has \d+ bytes instead of"):
        folder.content(2)
    with pytest.raises(Damaged, match=r"manifest\.json: it is missing"):
        folder.content(3)
