"""Where the data of ready tasks lies, and how it gets there: given by the user, or fetched and checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quorate.errors import BadInput

#: The folder of data, where no argument names one.
VARIABLE = "QUORATE_DATA"
_WAIT_S = 10.0  # for each answer of the server


@dataclass(frozen=True)
class Archive:
    """A tar file that is published somewhere, and the files in it that a task needs.

    name: of the data, in messages.
    url, md5: where it is, and what it must be.
    files: names of the wanted members, which are also their places below the folder of data.
    sizes_bytes: what each of them has.
    """

    name: str
    url: str
    md5: str
    files: tuple[str, ...]
    sizes_bytes: tuple[int, ...]


def data_folder(given: str | Path | None = None) -> Path:
    """The folder of data: the one given, the one that QUORATE_DATA names, or one in the user's cache."""
    if given is not None:
        return Path(given)
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "quorate"


def files_of(archive: Archive, given: str | Path | None = None) -> list[Path]:
    """The archive's files below the folder of data, fetched if one is missing. Each has the size it must have."""
    folder = data_folder(given)
    found = _files_in(archive, folder)
    missing = [name for name, file in zip(archive.files, found, strict=True) if not file.is_file()]
    if missing:
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"the folder of data {str(folder)!r} is a file; {_remedy(archive, folder)}")
        _fetch(archive, folder, missing)
        found = _files_in(archive, folder)
    for file, size in zip(found, archive.sizes_bytes, strict=True):
        if file.stat().st_size != size:
            raise BadInput(
                f"{str(file)!r} has {file.stat().st_size} bytes, but that file of {archive.name} has {size}; "
                f"remove it, and it is fetched again, or {_remedy(archive, folder)}"
            )
    return found


def _files_in(archive: Archive, folder: Path) -> list[Path]:
    """Their places. The folder may also be the innermost one, which holds them directly."""
    direct = [folder / Path(name).name for name in archive.files]
    return direct if all(file.is_file() for file in direct) else [folder / name for name in archive.files]


def _fetch(archive: Archive, folder: Path, missing: Sequence[str]) -> None:
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
            packed = Path(scratch) / "archive"
            with urllib.request.urlopen(archive.url, timeout=_WAIT_S) as answer, packed.open("wb") as file:
                shutil.copyfileobj(answer, file)
            _check_md5(archive, packed)
            _unpack(archive, packed, folder, Path(scratch))
    except OSError as error:  # URLError and time-outs are of this kind
        if is_new and folder.is_dir():
            folder.rmdir()
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise BadInput(
            f"{archive.name} is not complete in {str(folder)!r} ({missing[0]} is missing), and fetching it failed "
            f"({reason}); {_remedy(archive, folder)}"
        ) from error


def _check_md5(archive: Archive, packed: Path) -> None:
    with packed.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != archive.md5:
        raise BadInput(
            f"what {archive.url} gave has md5 {found}, but {archive.name} has {archive.md5}; "
            f"try again, or get it from elsewhere and {_remedy(archive, packed.parent.parent)}"
        )


def _unpack(archive: Archive, packed: Path, folder: Path, scratch: Path) -> None:
    """Only the wanted members, by their names; each is in its place whole or not at all."""
    with tarfile.open(packed) as tar:
        for name in archive.files:
            member = tar.extractfile(name)
            assert member is not None, f"{name} is a file in the archive, whose md5 is right"
            whole = scratch / Path(name).name
            with member, whole.open("wb") as file:
                shutil.copyfileobj(member, file)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            whole.replace(folder / name)


def _remedy(archive: Archive, folder: Path) -> str:
    place = folder / archive.files[0]
    return (
        f"unpack {archive.url} so that {str(place)!r} and the others are there, "
        f"or name the folder that has them: data=…, --data of an experiment, or the variable {VARIABLE}"
    )
