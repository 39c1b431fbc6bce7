"""Damaged files are detected and named, and loading falls back to the checkpoint before."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from quorate.checkpoint import CHECKPOINTS, CheckpointFolder
from quorate.errors import BadInput
from tests.checkpoint.states import FILES, flip, made, same, short_lived, some_state


def remade_manifest(checkpoint: Path) -> None:
    """Write a manifest whose checksums fit the damaged files, as only an attacker would."""
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
    os.mkfifo(damaged)  # opening it would block for ever
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
    """Any bytes give an older checkpoint or a BadInput, but no other exception."""
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
    """A run with two checkpoints, to be copied and damaged."""
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
