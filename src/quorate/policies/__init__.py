"""The update policies: pure state machines that decide which gradients make the next version."""

from __future__ import annotations

from typing import Any

from quorate.errors import BadInput, unknown_name
from quorate.policies._base import LATE_WORK, Policy
from quorate.policies.adaptive import AdaptiveBackup
from quorate.policies.asynchronous import Async
from quorate.policies.backup_sync import BackupSync
from quorate.policies.bounded_staleness import BoundedStaleness
from quorate.policies.deadline import Deadline
from quorate.policies.delayed import Delayed
from quorate.policies.full_sync import FullSync
from quorate.policies.k_batch_sync import KBatchSync
from quorate.policies.soft_sync import SoftSync

__all__ = [
    "LATE_WORK",
    "POLICIES",
    "AdaptiveBackup",
    "Async",
    "BackupSync",
    "BoundedStaleness",
    "Deadline",
    "Delayed",
    "FullSync",
    "KBatchSync",
    "Policy",
    "SoftSync",
    "make_policy",
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


def make_policy(name: str, **options: Any) -> Policy:
    """The policy of that name; used to rebuild one from a trace or a command line."""
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    policy = POLICIES[name]
    for option in options:
        if option not in policy.parameters:
            takes = ", ".join(policy.parameters) or "no options"
            raise BadInput(f"policy {name!r} has no option {option!r}; it takes: {takes}")
    return policy(**options)
