"""Calls to actors whose answers are waited for, with what may go wrong in our own words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from quorate.errors import LearnerLost, WorkerFailed

#: What Ray says when something is gone.
LOSSES = (RayActorError, ObjectLostError, NodeDiedError, WorkerCrashedError, ActorUnschedulableError)

_TRIES = 3


def ask(whose: str, call: Callable[[], Any], is_gone: Callable[[], bool] = lambda: False) -> Any:
    """The answer to a call; it is made again where Ray cannot say whether it was carried out."""
    return ask_all(whose, [call], is_gone)[0]


def ask_all(whose: str, calls: Sequence[Callable[[], Any]], is_gone: Callable[[], bool] = lambda: False) -> list[Any]:
    """The answers to calls that are made at the same time; `is_gone` knows when another try is no use."""
    pending = [call() for call in calls]
    for tried in range(_TRIES):
        try:
            return list(ray.get(pending))
        except ActorUnavailableError as error:
            if tried + 1 == _TRIES or is_gone():
                raise LearnerLost(f"{whose} cannot be reached") from error
            pending = [call() for call in calls]
        except RayActorError as error:
            raise LearnerLost(f"{whose} is gone") from error
        except RayError as error:
            cause = original(error)
            if isinstance(cause, RayTaskError) and not isinstance(cause.cause, LOSSES):
                # What the actor met could not even be sent.
                raise WorkerFailed(f"{whose} failed:\n{error}") from error
            if not isinstance(cause, RayError):
                raise cause from error
            # Its node is gone before it began, or an object that it needed.
            raise LearnerLost(f"{whose} is gone") from error
    raise AssertionError


def original(error: BaseException) -> BaseException:
    """The exception that an actor met, as it was there; the same one, if it was Ray that failed."""
    cause: Any = error.cause if isinstance(error, RayTaskError) else None
    if not isinstance(cause, Exception) or isinstance(cause, RayError):
        same: BaseException = error
        return same
    cause.add_note(str(error))
    found: BaseException = cause
    return found


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
