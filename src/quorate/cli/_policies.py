"""From `--workers 6+2 --policy backup …` to a policy."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from quorate.errors import BadInput, check_at_least, unknown_name
from quorate.policies import POLICIES, Policy, make_policy
from quorate.reporting.comparison import policy_label

DEFAULT_BOUND, DEFAULT_DELAY = 3, 1


class Workers(NamedTuple):
    """`6+2`: a quorum of 6 and 2 backups."""

    quorum: int
    backups: int

    @property
    def total(self) -> int:
        return self.quorum + self.backups


def parse_workers(text: str) -> Workers:
    """Read `6+2` or `8`."""
    match = re.fullmatch(r"\s*([-+]?\d+)\s*(?:\+\s*([-+]?\d+)\s*)?", text)
    if match is None:
        raise BadInput(f"workers is {text!r}, but it must be N+b, e.g. 6+2 (a quorum of 6 and 2 backups), or N, e.g. 8")
    if match[2] is None:
        return Workers(check_at_least("workers", int(match[1]), 1), 0)
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
    return Workers(quorum, backups)


def choose_policy(name: str | None, workers: Workers, given: dict[str, Any]) -> Policy:
    """The policy that was asked for; without a name it follows from the workers."""
    if name is None:
        name = "backup" if workers.backups else "full-sync"
    check_name(name)
    for option, value in given.items():
        if option not in POLICIES[name].parameters:
            raise BadInput(
                f"{shown(option, value)} does not fit policy {name!r}; {_who_takes(option)}, "
                f"and {name} takes {_taken_by(name)}"
            )
    policy = make_policy(name, **{**_defaults(name, workers), **given})
    policy.check(workers.total)
    return policy


def choose_policies(names: str, workers: Workers, given: dict[str, Any]) -> list[Policy]:
    """Several policies; each takes what it can of the options, and none may be left over."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise BadInput(f"policies is {names!r}, but a comparison needs at least one, e.g. full-sync,backup")
    for name in wanted:
        check_name(name)
        if wanted.count(name) > 1:
            raise BadInput(f"policies is {names!r}, which names {name} twice; name each policy once")
    for option, value in given.items():
        if not any(option in POLICIES[name].parameters for name in wanted):
            raise BadInput(
                f"{shown(option, value)} fits none of {', '.join(wanted)}; {_who_takes(option)}: "
                f"add one of these or leave the option out"
            )
    return [
        choose_policy(name, workers, {key: value for key, value in given.items() if key in POLICIES[name].parameters})
        for name in wanted
    ]


def label(policy: Policy, workers: int) -> str:
    """A policy with its numbers, as a table or a legend shows it."""
    return policy_label({**policy.options(), "name": policy.name}, workers)


def check_name(name: str) -> None:
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)


def shown(option: str, value: Any) -> str:
    """An option as it was typed."""
    flag = "--" + option.replace("_", "-")
    return flag if value is True else f"{flag} {value}"


def _defaults(name: str, workers: Workers) -> dict[str, Any]:
    """What N+b and nothing else says of a policy."""
    if name == "backup":
        return {"quorum": workers.quorum, "backups": workers.backups}
    if name == "deadline" and workers.backups:
        return {"quorum": workers.quorum}
    known: dict[str, dict[str, Any]] = {
        "softsync": {"gradients": workers.quorum},
        "k-batch": {"k": workers.quorum},
        "bounded": {"bound": DEFAULT_BOUND},
        "delayed": {"delay": DEFAULT_DELAY},
    }
    return known.get(name, {})


def _who_takes(option: str) -> str:
    takers = [name for name, policy in POLICIES.items() if option in policy.parameters]
    return f"it is for {', '.join(takers)}"


def _taken_by(name: str) -> str:
    """The options of a policy; what N+b says is none."""
    flags = [
        "--" + option.replace("_", "-") for option in POLICIES[name].parameters if option not in ("quorum", "backups")
    ]
    return ", ".join(flags) or "none"
