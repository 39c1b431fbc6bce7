"""Loads the classes of users' tasks and policies by name, and decides whether code that a trace names may be run.

A trace is data, and anybody may have written it. One rule for tasks and policies: their code runs only if its file is
in the current folder and belongs to the current user. The user who replays or resumes the run must name any other code
again.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quorate.errors import BadInput, close_to, unknown_name
from quorate.policies import POLICIES, Policy, build_policy, check_policy


def load_class(kind: str, text: str) -> Any:
    """The class of `file.py:Class` or `package.module:Class`; `kind` is "task" or "policy"."""
    where, _, name = (text, "", "") if text.endswith(".py") else text.rpartition(":")
    if not name:
        raise BadInput(_which_class(kind, text))
    module = _load_file(kind, where) if where.endswith(".py") else _load_module(kind, where)
    if not hasattr(module, name):
        known = [one for one, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        hint = close_to(name, known) or (f"; it has: {', '.join(known)}" if known else "")
        raise BadInput(f"{kind} {text!r}: {where} has no class {name!r}{hint}")
    return getattr(module, name)


def _which_class(kind: str, path: str) -> str:
    """The error for a file that was named without a class. The file is parsed, not run."""
    if not Path(path).is_file():
        return f"{kind} file {path!r} does not exist; give file.py:Class"
    try:
        parsed = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError) as error:
        return f"{kind} file {path!r} cannot be read: {error}"
    found = [f"{path}:{node.name}" for node in parsed.body if isinstance(node, ast.ClassDef)]
    if not found:
        return f"{kind} file {path!r} has no class; a {kind} is a class (docs/extending.md)"
    return f"{kind} {path!r} does not say which class; write {' or '.join(found)}"


def _load_file(kind: str, path: str) -> Any:
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"{kind} file {path!r} does not exist; give file.py:Class")
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and Path(script).exists() and file.samefile(script):
        return sys.modules["__main__"]  # the running script must not run again
    spec = importlib.util.spec_from_file_location(f"quorate_task_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise BadInput(f"{kind} file {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _load_module(kind: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise BadInput(f"{kind} module {name!r} cannot be imported: {type(error).__name__}: {error}") from error


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
        if spec is None:  # a script's own module, say: its folder is not where this program looks
            yield Path(name)
            return
        if spec.origin is not None:
            yield Path(spec.origin)
        folders = spec.submodule_search_locations


# ---------------------------------------------------------------- policies


def policy_class(name: str) -> type[Policy]:
    """The class that `backup`, `file.py:Class` or `package.module:Class` names."""
    if name in POLICIES:
        return POLICIES[name]
    where = name.rpartition(":")[0]
    if not where and not name.endswith(".py"):
        raise unknown_name("policy", name, [*POLICIES, "file.py:Class", "package.module:Class"])
    kind = load_class("policy", name)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise BadInput(f"policy {name!r} is no policy; make it a subclass of quorate.Policy (docs/extending.md)")
    kind.source = name, str(Path(where).absolute()) if where.endswith(".py") else None
    return kind


def as_policy(given: Any) -> Policy:
    """A policy given as an object, a class or a name."""
    if isinstance(given, str):
        given = policy_class(given)
    if isinstance(given, type) and issubclass(given, Policy):
        return build_policy(given, {})
    if not isinstance(given, Policy):
        raise BadInput(f"policy is {given!r}, a {type(given).__name__}; give a policy such as quorate.BackupSync(6, 2)")
    return check_policy(given)


def recorded_policy(described: dict[str, Any], given: Any = None) -> Policy:
    """The policy that a trace's header describes, with the recorded arguments.

    given: the policy's class, its place (`file.py:Class`) or a policy of that class, to use instead of the recorded
    place.
    """
    options = dict(described)
    name, source, file = options.pop("name"), options.pop("source", None), options.pop("source_file", None)
    if given is None:
        given = name if source is None and name in POLICIES else code_to_run("policy", source or name, file)
    kind = policy_class(given) if isinstance(given, str) else given if isinstance(given, type) else type(given)
    if not issubclass(kind, Policy) or kind.name != name:
        said = kind.name if issubclass(kind, Policy) else kind.__name__
        raise BadInput(f"the run was made with policy {name!r}, but the one given is {said!r}; give the same, or none")
    return build_policy(kind, options)
