"""Checkpoints of a run that survive a kill, a crash of the machine and a full disk.

A checkpoint is a folder. It is written under a temporary name, synced to disk, and only then renamed. So a
folder with a final name was once complete; checksums tell whether it still is.

    checkpoints/00000123/tensors.safetensors
    checkpoints/00000123/state.json             all other state; it refers to tensors by name
    checkpoints/00000123/manifest.json          sizes and checksums of the two
    checkpoints/.writing-00000124-<pid>         being written
    checkpoints/.replaced-00000123-<pid>        the old checkpoint, while a new one of the same version replaces it
    checkpoints/.removing-00000100-<pid>        being deleted
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quorate.errors import BadInput, check_at_least
from quorate.tensor_state import check_can_save, check_same_tensors, find_safetensors, pack, store, tensors_in, unpack

__all__ = [
    "CHECKPOINTS",
    "BackgroundWriter",
    "CheckpointFolder",
    "Damaged",
    "Loaded",
    "check_can_save",
    "check_same_tensors",
    "save_or_explain",
    "state_in",
]

CHECKPOINTS = "checkpoints"
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
FILES = (TENSORS, STATE)
SCHEMA = 1
#: Two checkpoints are kept: if the disk damages the newest, a run falls back to the one before.
KEPT = 2

_WRITING, _REPLACED, _REMOVING = ".writing-", ".replaced-", ".removing-"
_FINISHED = re.compile(r"(?:\.replaced-([0-9]{8,})-[0-9]+)|([0-9]{8,})")


@dataclass(frozen=True)
class Loaded:
    """A sound checkpoint, and a sentence for each newer checkpoint that was damaged."""

    version: int
    state: dict[str, Any]
    damaged: tuple[str, ...]


class Damaged(Exception):  # noqa: N818
    """A checkpoint is not as it was written: the message names the file and the damage."""


class CheckpointFolder:
    """The checkpoints of one run. Only one process may write them, and only one thread at a time."""

    def __init__(self, run: Path) -> None:
        self.folder = run / CHECKPOINTS
        self._durable: int | None = None  # newest version written with `durable`, which survives a machine crash

    def versions(self) -> list[int]:
        """The versions that were written completely, oldest first; `load` checks whether they are still sound."""
        return sorted(self._finished())

    # ------------------------------------------------------------ writing

    def prepare(self) -> None:
        """Hook before a write: a subclass brings files that the checkpoint refers to onto the disk."""

    def save(self, version: int, state: dict[str, Any], *, durable: bool = True) -> Path:
        """Write a checkpoint; on return it is on disk. An OSError leaves the folder as it was before.

        This checkpoint and the one before it are kept. Higher versions are deleted: the run went back behind them,
        because they were damaged or by choice, and `load` must not prefer them to the version that the run makes now.

        durable: False leaves the write to the kernel's cache. Such a checkpoint survives the death of any process,
        but perhaps not a crash of the machine; so the newest durable checkpoint is kept as well.
        """
        name = _name(check_at_least("version", version, 0))
        packed, tensors = pack(state)
        find_safetensors()
        temporary, final = self.folder / f"{_WRITING}{name}-{os.getpid()}", self.folder / name
        try:
            _make_folders(temporary, durable)
            text = json.dumps(packed, allow_nan=False, ensure_ascii=False)
            _write_bytes(temporary / STATE, text.encode("utf-8", "surrogatepass"), durable)
            store(temporary / TENSORS, tensors)
            _fsync(temporary / TENSORS, durable)
            _write_bytes(temporary / MANIFEST, _manifest(temporary, version), durable)
            _fsync(temporary, durable)
            self._publish(temporary, final, durable)
        except BaseException:
            _remove_tree(temporary)
            raise
        if durable:
            self._durable = version
        self._remove_old(version)
        return final

    def _publish(self, temporary: Path, final: Path, durable: bool) -> None:
        """Give a complete checkpoint its final name; at every moment it or its predecessor can be loaded."""
        replaced = self.folder / f"{_REPLACED}{final.name}-{os.getpid()}"
        if final.exists():
            self._discard_replaced(final)  # a leftover of an earlier write: the name is needed
            _rename(final, replaced)
        try:
            _rename(temporary, final)
            _fsync(self.folder, durable)
        except OSError:
            # A failed undo does no harm: both folders are complete, and `load` knows both names.
            with suppress(OSError):
                _rename(final, temporary)
            with suppress(OSError):
                _rename(replaced, final)
            raise
        self._discard_replaced(final)

    def _remove_old(self, newest: int) -> None:
        finished = self._finished()
        kept = sorted(version for version in finished if version <= newest)[-KEPT:]
        if self._durable is not None and self._durable <= newest:
            kept.append(self._durable)
        for version in finished.keys() - kept:
            self._discard(finished[version])

    def _discard_replaced(self, final: Path) -> None:
        for replaced in self.folder.glob(f"{_REPLACED}{final.name}-*"):
            self._discard(replaced)

    def _discard(self, checkpoint: Path) -> None:
        """Delete a checkpoint. It is renamed first, so that a half-deleted checkpoint never looks complete.

        Errors are ignored, because the checkpoint just written is sound all the same; `sweep` tries again.
        """
        removing = checkpoint.with_name(f"{_REMOVING}{checkpoint.name}-{os.getpid()}")
        _remove_tree(removing)
        with suppress(OSError):
            _rename(checkpoint, removing)
            _remove_tree(removing)

    def sweep(self) -> None:
        """Remove leftovers of a killed writer. Only for the start of a run: it also removes writes in progress."""
        for entry in self._entries():
            if entry.name.startswith((_WRITING, _REMOVING)):
                _remove_tree(entry)
        for version, entry in self._finished().items():
            if entry.name.startswith(_REPLACED):  # the writer was killed before it published the new checkpoint
                _rename(entry, self.folder / _name(version))
        for entry in self._entries():
            if entry.name.startswith(_REPLACED):
                _remove_tree(entry)

    # ------------------------------------------------------------ reading

    def load(self) -> Loaded:
        """The newest checkpoint that is undamaged. Its tensors are in main memory."""
        finished = self._finished()
        if not finished:
            raise BadInput(f"the folder {str(self.folder)!r} holds no checkpoint")
        find_safetensors()
        damaged: list[str] = []
        for version in sorted(finished, reverse=True):
            try:
                state = state_in(_content_of(finished[version], version))
            except Damaged as fault:
                damaged.append(f"checkpoint {_name(version)} is damaged ({fault})")
                continue
            return Loaded(version, state, tuple(f"{one}; fell back to {_name(version)}" for one in damaged))
        raise BadInput(f"the folder {str(self.folder)!r} holds no sound checkpoint: {'; '.join(damaged)}")

    def content(self, version: int) -> dict[str, bytes]:
        """The raw files of one checkpoint, to be sent elsewhere; raises `Damaged` if they are not as written."""
        return _content_of(self._finished().get(version, self.folder / _name(version)), version)

    def _finished(self) -> dict[int, Path]:
        """The folder of each version. A replaced checkpoint counts as long as no new one has its final name."""
        found: dict[int, Path] = {}
        for entry in self._entries():  # "." sorts before the digits, so a final name wins
            match = _FINISHED.fullmatch(entry.name)
            if match is not None and entry.is_dir():
                version = int(match[1] or match[2])
                if _name(version) == (match[1] or match[2]):
                    found[version] = entry
        return found

    def _entries(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.is_dir() else []


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread, so that training goes on meanwhile.

    on_failure: gets a sentence when the disk refused a checkpoint; the run can go on without it.
    on_saved: gets the version of each checkpoint that is on disk.
    Both are called from the writing thread. The next `submit` or `finish` raises any other exception.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        on_failure: Callable[[str], None],
        on_saved: Callable[[int], None] | None = None,
    ) -> None:
        self._folder, self._on_failure, self._on_saved = folder, on_failure, on_saved
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, version: int, state: dict[str, Any]) -> None:
        """Begin to write a checkpoint. The caller must not change the state any more: give copies."""
        assert not self.busy, "one checkpoint at a time"
        self.finish()
        # Not a daemon thread: Python then waits for the write at exit, instead of cutting it off.
        self._thread = threading.Thread(target=self._write, args=(version, state), name="checkpoint writer")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the checkpoint being written; after that no thread is left."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def _write(self, version: int, state: dict[str, Any]) -> None:
        try:
            refusal = save_or_explain(self._folder, version, state)
            if refusal is not None:
                self._on_failure(refusal)
            elif self._on_saved is not None:
                self._on_saved(version)
        except BaseException as fault:
            self._fault = fault


def save_or_explain(folder: CheckpointFolder, version: int, state: dict[str, Any]) -> str | None:
    """Write a checkpoint; returns a sentence if the disk refused it."""
    try:
        folder.prepare()
        folder.save(version, state)
    except OSError as fault:
        versions: list[int] = []
        with suppress(OSError):  # a disk that cannot be written may not be readable either
            versions = folder.versions()
        last = f"the last one is version {versions[-1]}" if versions else "there is none before it"
        return (
            f"checkpoint of version {version} could not be written: {fault.strerror or fault}; training goes on, {last}"
        )
    return None


# ------------------------------------------------------------ steps of writing


def _name(version: int) -> str:
    return f"{version:08d}"


def _make_folders(temporary: Path, durable: bool) -> None:
    """Make an empty folder to write into. It may exist: in containers, processes share a pid, hence the name."""
    folder = temporary.parent
    if not folder.is_dir():
        folder.mkdir(parents=True)
        _fsync(folder.parent, durable)
    _remove_tree(temporary)
    temporary.mkdir()


def _write_bytes(file: Path, data: bytes, durable: bool) -> None:
    file.write_bytes(data)
    _fsync(file, durable)


def _manifest(folder: Path, version: int) -> bytes:
    files = {}
    for name in FILES:
        with (folder / name).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256}
    return json.dumps({"schema": SCHEMA, "version": version, "files": files}, indent=2).encode()


def _fsync(path: Path, durable: bool) -> None:
    """Sync a file, or the names in a folder, to the disk; unless the checkpoint need not be durable."""
    if not durable:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename(old: Path, new: Path) -> None:
    old.replace(new)


def _remove_tree(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------ steps of reading


def _content_of(checkpoint: Path, version: int) -> dict[str, bytes]:
    """The files of a checkpoint, with sizes and checksums verified."""
    with _reported_as_damage(MANIFEST):
        manifest = json.loads(_content(checkpoint / MANIFEST))
        _check_schema(checkpoint, manifest["schema"])
        if manifest["version"] != version:
            raise Damaged(f"{MANIFEST}: it is of another version")
        records = {name: (manifest["files"][name]["bytes"], manifest["files"][name]["sha256"]) for name in FILES}
    return {name: _verified(checkpoint / name, *record) for name, record in records.items()}


def state_in(content: dict[str, bytes]) -> dict[str, Any]:
    """The state in the files of a checkpoint; its tensors are in main memory."""
    with _reported_as_damage(TENSORS):
        tensors = tensors_in(content[TENSORS])
    with _reported_as_damage(STATE):
        state = unpack(json.loads(content[STATE].decode("utf-8", "surrogatepass")), tensors)
        if type(state) is not dict:
            raise ValueError("the state must be a dict")
    return state


@contextmanager
def _reported_as_damage(name: str) -> Iterator[None]:
    """Report any exception about the content of a file as `Damaged`: bad bytes can raise anything."""
    try:
        yield
    except (Damaged, BadInput):
        raise
    except OSError as fault:
        raise Damaged(f"{name}: {fault.strerror or fault}") from fault
    except Exception as fault:
        raise Damaged(f"{name}: it cannot be understood ({type(fault).__name__})") from fault


def _check_schema(checkpoint: Path, schema: Any) -> None:
    if type(schema) is not int or schema < SCHEMA:
        raise Damaged(f"{MANIFEST}: {schema!r} is no schema")
    if schema > SCHEMA:  # not damaged: falling back to an older checkpoint would throw good work away
        raise BadInput(
            f"the checkpoint {str(checkpoint)!r} is of schema {schema}, but this release reads only {SCHEMA}; "
            "use the release that wrote it"
        )


def _verified(file: Path, size: Any, sha256: Any) -> bytes:
    with _reported_as_damage(file.name):
        if file.is_file() and file.stat().st_size != size:
            raise Damaged(f"{file.name}: it has {file.stat().st_size} bytes instead of {size!r}")
        content = _content(file)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise Damaged(f"{file.name}: its checksum differs")
        return content


def _content(file: Path) -> bytes:
    if not file.is_file():
        raise Damaged(f"{file.name}: it is missing")
    return file.read_bytes()
