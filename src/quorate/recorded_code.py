"""Whether code that a trace names may be run.

A trace is data, and anybody may have written it. One rule for tasks and policies: their code runs only if its file is
in the current folder and belongs to the current user. The user who replays or resumes the run must name any other code
again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from quorate.errors import BadInput


def code_to_run(kind: str, recorded: str, file: str | None = None) -> str:
    """The text that loads the recorded task or policy; BadInput if the user must name the code again.

    kind: "task" or "policy", which is also the name of the option and of the argument.
    recorded: `file.py:Class` or `package.module:Class`, as it was given to the run.
    file: the absolute path of that file when the run was made. It is used if it still exists.
    """
    where, _, class_name = recorded.rpartition(":")
    if where.endswith(".py") and file is not None and os.path.isfile(file):  # noqa: PTH113 - False for any bad path
        recorded = f"{file}:{class_name}"
    if where == "__main__" and not hasattr(sys.modules["__main__"], class_name):
        raise BadInput(
            f"the run was made by a script with a {kind} of its own, {class_name}; "
            f"give that script's {kind}: --{kind} SCRIPT.py:{class_name}"
        )
    for found in _files_of(recorded):
        named = f"the trace names the {kind} {recorded!r}"
        try:
            real = found.resolve(strict=True)
            owner = real.stat().st_uid
        except (OSError, ValueError):
            raise BadInput(
                f"{named}, but {str(found)!r} cannot be found here; give the {kind}: --{kind} FILE.py:{class_name}"
            ) from None
        trust = f"if you trust that code, name it yourself: --{kind} {recorded}"
        if not real.is_relative_to(Path.cwd().resolve()):
            raise BadInput(f"{named}, and {str(real)!r} lies outside the current folder; {trust}")
        if hasattr(os, "geteuid") and owner != os.geteuid():
            raise BadInput(f"{named}, and {str(real)!r} belongs to another user; {trust}")
    return recorded


def _files_of(text: str) -> Iterator[Path]:
    """The files that loading `file.py:Class` or `package.module:Class` would run. None of them is run here."""
    where = text.rpartition(":")[0]
    if where.endswith(".py"):
        yield Path(where)
        return
    if where.startswith("quorate.tasks."):  # code of this package
        return
    name, folders = "", None
    for part in where.split(".") if where else ():
        name = f"{name}.{part}" if name else part
        if name in sys.modules:  # it has run already
            folders = getattr(sys.modules[name], "__path__", None)
            continue
        found = (finder.find_spec(name, folders, None) for finder in sys.meta_path)
        spec = next((one for one in found if one is not None), None)
        if spec is None:
            return  # loading will report that there is no such module
        if spec.origin is not None:
            yield Path(spec.origin)
        folders = spec.submodule_search_locations
