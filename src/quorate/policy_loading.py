"""Loads policies by name: those of quorate, and classes in the user's files and packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quorate.errors import BadInput, unknown_name
from quorate.policies import POLICIES, Policy, build_policy, check_policy
from quorate.user_code import code_to_run, load_class


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


def make_policy(name: str, **options: Any) -> Policy:
    """The policy of that name, or of the class in `file.py:Class` or `package.module:Class`, with these arguments."""
    return build_policy(policy_class(name), options)


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
