"""Data files of the ready-made tasks: given by the user, or downloaded and checked."""

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

#: Environment variable with the data folder, used if no argument names one.
VARIABLE = "QUORATE_DATA"
_TIMEOUT_S = 10.0  # for each response of the server


@dataclass(frozen=True, kw_only=True)
class _Data:
    """Data on a server.

    name: of the data, for messages.
    files: paths below the data folder.
    sizes_bytes: of the files.
    """

    name: str
    url: str
    files: tuple[str, ...]
    sizes_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Archive(_Data):
    """A tar file, and the members of it that a task needs, which are its `files`."""

    md5: str  # of the tar file


@dataclass(frozen=True, kw_only=True)
class SingleFiles(_Data):
    """Files that are published one by one; a file's own name is appended to the URL."""

    md5s: tuple[str, ...]

    def url_of(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{Path(name).name}"


Published = Archive | SingleFiles


def data_folder(given: str | Path | None = None) -> Path:
    """The data folder: the given one, the one that QUORATE_DATA names, or one in the user's cache."""
    if given is not None:
        return Path(given)
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE])
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "quorate"


def files_of(archive: Published, given: str | Path | None = None) -> list[Path]:
    """The paths of the data's files, downloaded if one is missing. Their sizes are checked."""
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


def _files_in(archive: Published, folder: Path) -> list[Path]:
    """The paths of the files. The given folder may also be the innermost one, which holds them directly."""
    direct = [folder / Path(name).name for name in archive.files]
    return direct if all(file.is_file() for file in direct) else [folder / name for name in archive.files]


def _fetch(archive: Published, folder: Path, missing: Sequence[str]) -> None:
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
            if isinstance(archive, Archive):
                packed = Path(scratch) / "archive"
                _fetch_one(archive, archive.url, archive.md5, packed, folder)
                _unpack(archive, packed, folder, Path(scratch))
            else:
                md5s = dict(zip(archive.files, archive.md5s, strict=True))
                for name in missing:
                    _fetch_one(archive, archive.url_of(name), md5s[name], Path(scratch) / Path(name).name, folder)
                for name in missing:  # a second loop, so that a failed download leaves no partial data
                    _move(Path(scratch) / Path(name).name, folder / name)
    except OSError as error:  # includes URLError and timeouts
        if is_new and folder.is_dir():
            folder.rmdir()
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise BadInput(
            f"{archive.name} is not complete in {str(folder)!r} ({missing[0]} is missing), and fetching it failed "
            f"({reason}); {_remedy(archive, folder)}"
        ) from error


def _fetch_one(archive: Published, url: str, md5: str, place: Path, folder: Path) -> None:
    """Download a file and check its md5."""
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, place.open("wb") as file:
        shutil.copyfileobj(response, file)
    with place.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        raise BadInput(
            f"what {url} gave has md5 {found}, but {archive.name} has {md5}; "
            f"try again, or get it from elsewhere and {_remedy(archive, folder)}"
        )


def _unpack(archive: Archive, packed: Path, folder: Path, scratch: Path) -> None:
    """Extract the members that the task needs. Each is moved into place only when it is complete."""
    with tarfile.open(packed) as tar:
        for name in archive.files:
            member = tar.extractfile(name)
            assert member is not None, f"{name} is a file in the archive, whose md5 is right"
            whole = scratch / Path(name).name
            with member, whole.open("wb") as file:
                shutil.copyfileobj(member, file)
            _move(whole, folder / name)


def _move(file: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    file.replace(place)


def _remedy(archive: Published, folder: Path) -> str:
    if isinstance(archive, Archive):
        action = f"unpack {archive.url}"
    else:
        action = f"get {', '.join(Path(name).name for name in archive.files)} of {archive.url}"
    verb = "and the others are" if len(archive.files) > 1 else "is"
    return (
        f"{action} so that {str(folder / archive.files[0])!r} {verb} there, "
        f"or name the folder that has them: data=…, --data of an experiment, or the variable {VARIABLE}"
    )
