"""The update policies: pure state machines that decide which gradients make the next version."""

from __future__ import annotations

import re
from inspect import Parameter, signature
from typing import Any

from quorate.errors import BadInput
from quorate.policies.adaptive import AdaptiveBackup
from quorate.policies.arrival_groups import ArrivalPolicy
from quorate.policies.asynchronous import Async
from quorate.policies.backup_sync import BackupSync
from quorate.policies.base import Policy
from quorate.policies.bounded_staleness import BoundedStaleness
from quorate.policies.deadline import Deadline
from quorate.policies.delayed import Delayed
from quorate.policies.full_sync import FullSync
from quorate.policies.k_batch_sync import KBatchSync
from quorate.policies.rounds import RoundPolicy
from quorate.policies.soft_sync import SoftSync

#: The names that `quorate` offers, too.
__all__ = [
    "AdaptiveBackup",
    "ArrivalPolicy",
    "Async",
    "BackupSync",
    "BoundedStaleness",
    "Deadline",
    "Delayed",
    "FullSync",
    "KBatchSync",
    "Policy",
    "RoundPolicy",
    "SoftSync",
]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        FullSync,
        BackupSync,
        Async,
        SoftSync,
        BoundedStaleness,
        KBatchSync,
        Delayed,
        Deadline,
        AdaptiveBackup,
    )
}


def build_policy(kind: type[Policy], options: dict[str, Any]) -> Policy:
    """A policy of this class, with these arguments; BadInput, with the remedy, if they do not fit."""
    arguments = signature(kind).parameters
    for option in options:
        if option not in arguments:
            takes = ", ".join(arguments) or "no options"
            raise BadInput(f"policy {kind.name!r} has no option {option!r}; it takes: {takes}")
    missing = getattr(kind, "__abstractmethods__", None)
    if missing:
        raise BadInput(f"policy {kind.name!r} lacks {', '.join(sorted(missing))}; write them (docs/extending.md)")
    needs = [name for name, one in arguments.items() if one.default is Parameter.empty]
    if not options.keys() >= set(needs):
        raise BadInput(
            f"policy {kind.name!r} needs {' and '.join(needs)}; "
            f"write {kind.__name__}({', '.join(f'{name}=…' for name in needs)})"
            + ("" if kind.name in POLICIES else f", or --policy-option {needs[0]}=… on the command line")
        )
    try:
        policy = kind(**options)
    except TypeError as error:  # a value of another type, such as text where a number belongs
        given = ", ".join(f"{name}={value!r:.40}" for name, value in options.items())
        raise BadInput(f"policy {kind.name!r} cannot be made with {given}: {error}") from error
    return check_policy(policy)


def check_policy(policy: Policy) -> Policy:
    """Refuse a policy that a trace could not record, or could not distinguish from others; returns the policy."""
    name = policy.name
    if not re.fullmatch(r"[\w.+-]+", name):
        raise BadInput(f"{type(policy).__name__} has the name {name!r}, but it names folders too; use letters and -")
    if type(policy) is not POLICIES.get(name, type(policy)):
        raise BadInput(f"{type(policy).__name__} has the name of another policy, {name!r}; give it a name of its own")
    for taken in ("name", "source", "source_file"):
        if taken in policy.parameters():
            raise BadInput(
                f"policy {name!r} has an argument {taken!r}, which has another meaning in a trace; rename it"
            )
    policy.describe()
    return policy
