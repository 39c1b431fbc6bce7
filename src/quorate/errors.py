"""The errors that a user sees, and checks that raise them. A message names the value, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class QuorateError(Exception):
    """Base class of the errors that the command line shows as a sentence rather than a traceback."""


class BadInput(QuorateError, ValueError):  # noqa: N818 - it names the user's input
    """A value breaks a rule: the message names the value, the rule and the remedy."""


class QuorumLost(QuorateError, RuntimeError):  # noqa: N818
    """Too few workers are alive to make the next version, and the time to wait for more is over."""


class Diverged(QuorateError, RuntimeError):  # noqa: N818
    """Gradient after gradient held NaN or Inf: nothing is left to apply."""


class WorkerFailed(QuorateError, RuntimeError):  # noqa: N818
    """Workers fail again and again in the same way; the message has the error of the last worker."""


class LearnerLost(QuorateError, RuntimeError):  # noqa: N818
    """A part of the newest version is gone with the machine that held it; the run must restart from a checkpoint."""

    #: Why the run was over, if the learner was lost after the last update.
    run_was_over: str | None = None


class ClusterLost(QuorateError, RuntimeError):  # noqa: N818
    """The run's cluster is gone from this machine; the run can go on only on another cluster."""


class ProcessLost(QuorateError, RuntimeError):  # noqa: N818
    """A process of a torchrun script is gone, and the other processes cannot go on without it."""


class PolicyFailed(QuorateError, AssertionError):  # noqa: N818
    """A policy asked for something impossible, or stands still: a bug in the policy."""


class ReplayMismatch(QuorateError, RuntimeError):  # noqa: N818
    """A replayed run decided otherwise than the recorded one."""


def install_line(extra: str) -> str:
    """How to install an extra. It names a clone as well, since quorate is on no package index yet."""
    return f"pip install 'quorate[{extra}]' (in a clone: pip install '.[{extra}]')"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> BadInput:
    """The error for an unknown name; it lists the known names."""
    known = sorted(known)
    return BadInput(f"{kind} {name!r} is not known{close_to(name, known)}; choose one of: {', '.join(known)}")


def close_to(name: str, known: Iterable[str]) -> str:
    """A "did you mean" for an error message, or an empty text if no known name is close."""
    bare = {one.strip("-").lower(): one for one in known}
    typed = name.strip("-").lower()
    begun = [one for one in bare if typed and one.startswith(typed)]  # "full" for full-sync
    alike = begun or get_close_matches(typed, bare, 1, cutoff=0.7)  # below 0.7 it is another word, not a typing error
    return f" (did you mean {bare[alike[0]]}?)" if alike else ""


def check_at_least(name: str, value: int, least: int, most: int | None = None) -> int:
    """Check that a value is a whole number in its limits; `most` rules out computations that would never end."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{name} is {value!r}, but it must be a whole number, at least {least}")
    if value < least:
        raise BadInput(f"{name} is {value}, but it must be at least {least}")
    if most is not None and value > most:
        raise BadInput(f"{name} is {value:,}, but the limit is {most:,}; give fewer")
    return value
