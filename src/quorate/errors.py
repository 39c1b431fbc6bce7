"""What can go wrong, in words a person can act on."""

from __future__ import annotations

from collections.abc import Iterable


class QuorateError(Exception):
    """Anything quorate reports as a sentence rather than a traceback."""


class BadInput(QuorateError, ValueError):  # noqa: N818 - it is what the user gave, not what broke
    """A value breaks a rule: the message names the value, the rule and the remedy."""


class QuorumLost(QuorateError, RuntimeError):  # noqa: N818
    """Too few workers are alive to make the next version, and the time to wait is over."""


class Diverged(QuorateError, RuntimeError):  # noqa: N818
    """Gradient after gradient held NaN or Inf: nothing is left to apply."""


class WorkerFailed(QuorateError, RuntimeError):  # noqa: N818
    """Workers fail again and again in the same way; the message has what the last one said."""


class LearnerLost(QuorateError, RuntimeError):  # noqa: N818
    """A part of the newest version is gone with the machine that held it; only a checkpoint has it."""

    #: Why the run was over, if it was only to be looked at once more.
    run_was_over: str | None = None


class ProcessLost(QuorateError, RuntimeError):  # noqa: N818
    """A process of a training script under torchrun is gone, and the others cannot go on without it."""


class ReplayMismatch(QuorateError, RuntimeError):  # noqa: N818
    """A replayed run decided otherwise than the recorded one."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> BadInput:
    """The error for a name that no registry holds; it lists those that exist."""
    return BadInput(f"{kind} {name!r} is not known; choose one of: {', '.join(sorted(known))}")


def check_at_least(name: str, value: int, least: int) -> int:
    """A whole number that is not too small."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadInput(f"{name} is {value!r}, but it must be a whole number, at least {least}")
    if value < least:
        raise BadInput(f"{name} is {value}, but it must be at least {least}")
    return value
