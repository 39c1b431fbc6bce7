"""From options such as `--workers 6+2 --policy backup` to a policy."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any, NamedTuple

from quorate.errors import BadInput, check_at_least
from quorate.policies import POLICIES, BackupSync, FullSync, Policy, build_policy
from quorate.reporting.comparison import policy_label
from quorate.user_code import policy_class


class WorkerCounts(NamedTuple):
    """`6+2`: a quorum of 6 and 2 backups."""

    quorum: int
    backups: int

    @property
    def total(self) -> int:
        return self.quorum + self.backups


def parse_workers(text: str) -> WorkerCounts:
    """Read `6+2` or `8`."""
    match = re.fullmatch(r"\s*([-+]?\d+)\s*(?:\+\s*([-+]?\d+)\s*)?", text)
    if match is None:
        raise BadInput(f"workers is {text!r}, but it must be N+b, e.g. 6+2 (a quorum of 6 and 2 backups), or N, e.g. 8")
    if match[2] is None:
        return WorkerCounts(check_at_least("workers", int(match[1]), 1), 0)
    quorum, backups = int(match[1]), int(match[2])
    if quorum < 1:
        raise BadInput(
            f"workers is {text!r}: its quorum is {quorum}, but it must be at least 1, as in 1+{max(backups, 0)}"
        )
    if backups < 0:
        raise BadInput(
            f"workers is {text!r}: its backups are {backups}, so the quorum {quorum} is above the "
            f"{max(0, quorum + backups)} workers there would be; backups are at least 0, as in {quorum}+0"
        )
    return WorkerCounts(quorum, backups)


def choose_policy(name: str | None, workers: WorkerCounts, given: dict[str, Any], own: Sequence[str] = ()) -> Policy:
    """The policy of this name; without a name, backup or full-sync, depending on the workers.

    given: options by name. own: `NAME=VALUE` options for a policy of the user's own.
    """
    usual = BackupSync if workers.backups else FullSync
    kind = usual if name is None else _class_of(name)
    takes = _options_of(kind)
    for option, value in given.items():
        if option not in takes:
            raise BadInput(
                f"{flag_text(option, value)} does not fit policy {kind.name!r}; {_policies_that_take(option)}, "
                f"and {kind.name} takes {_flags_of(kind)}"
            )
    return _build(kind, workers, {**given, **parse_own_options(own)})


def choose_policies(names: str, workers: WorkerCounts, given: dict[str, Any], own: Sequence[str] = ()) -> list[Policy]:
    """Several policies. Each takes the options that it has; every option must fit at least one policy."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise BadInput(f"policies is {names!r}, but a comparison needs at least one, e.g. full-sync,backup")
    kinds = [_class_of(name) for name in wanted]
    known = [kind.name for kind in kinds]
    for name in known:
        if known.count(name) > 1:
            raise BadInput(f"policies is {names!r}, which names {name} twice; name each policy once")
    own_options = parse_own_options(own)
    wants = [
        {name: value for name, value in given.items() if name in _options_of(kind)}
        | {name: value for name, value in own_options.items() if name in kind.parameters()}
        for kind in kinds
    ]
    for option, value in (given | own_options).items():
        if not any(option in options for options in wants):
            raise BadInput(
                f"{flag_text(option, value)} fits none of {', '.join(known)}; {_policies_that_take(option)}: "
                f"add one of these or leave the option out"
            )
    return [_build(kind, workers, options) for kind, options in zip(kinds, wants, strict=True)]


def _class_of(name: str) -> type[Policy]:
    with redirect_stdout(sys.stderr):  # a policy's file may print; stdout is for the result
        return policy_class(name)


def _build(kind: type[Policy], workers: WorkerCounts, options: dict[str, Any]) -> Policy:
    policy = build_policy(kind, {**kind.from_workers(*workers), **options})
    policy.check(workers.total)
    return policy


def parse_own_options(given: Sequence[str]) -> dict[str, Any]:
    """Read options such as `share=0.5`: the value is JSON, or else text."""
    found: dict[str, Any] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.strip().isidentifier():
            raise BadInput(f"policy_option is {text!r}, but it must be NAME=VALUE, e.g. share=0.5")
        try:
            found[name.strip()] = json.loads(value)
        except ValueError:
            found[name.strip()] = value
    return found


def label(policy: Policy, workers: int) -> str:
    """A policy with its numbers, for tables and legends."""
    return policy_label(policy.describe(), workers)


def flag_text(option: str, value: Any) -> str:
    """An option as the user types it."""
    flag = "--" + option.replace("_", "-")
    if option == "together" and value is False:
        return "--apart"
    return flag if value is True else f"{flag} {value}"


def _policies_that_take(option: str) -> str:
    takers = [name for name, kind in POLICIES.items() if option in _options_of(kind)]
    return f"it is for {', '.join(takers)}" if takers else "no policy of quorate's takes it"


def _flags_of(kind: type[Policy]) -> str:
    return ", ".join("--" + option.replace("_", "-") for option in _options_of(kind)) or "none"


def _options_of(kind: type[Policy]) -> list[str]:
    """The options of a policy. If it has backups, `--workers N+b` alone gives its quorum and backups."""
    from_workers = ("quorum", "backups") if "backups" in kind.parameters() else ()
    return [option for option in kind.parameters() if option not in from_workers]
