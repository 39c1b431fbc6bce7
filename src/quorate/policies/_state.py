"""Policy state as plain JSON values, for checkpoints."""

from __future__ import annotations

from collections import deque
from typing import Any

from quorate.events import Action, Apply, Cancel, Choose, Drop, SetTimer, Start, Ticket

_ACTIONS = {kind.__name__: kind for kind in (Start, Apply, Drop, Cancel, SetTimer, Choose)}


def pack(value: Any) -> Any:
    """JSON-ready form of what policies keep: numbers, tickets, and lists, deques and dicts of those."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Ticket):
        return {"ticket": list(value)}
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, deque):
        return {"deque": [pack(item) for item in value], "maxlen": value.maxlen}
    if isinstance(value, dict):  # pairs, since JSON keys are text and the order is part of the state
        return {"pairs": [[pack(key), pack(item)] for key, item in value.items()]}
    raise TypeError(f"policy state may not hold a {type(value).__name__}")


def unpack(value: Any) -> Any:
    """The inverse of `pack`."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if "ticket" in value:
            return Ticket(*value["ticket"])
        if "deque" in value:
            return deque((unpack(item) for item in value["deque"]), maxlen=value["maxlen"])
        return {unpack(key): unpack(item) for key, item in value["pairs"]}
    return value


def pack_action(action: Action) -> list[Any]:
    """A decision as JSON values."""
    return [type(action).__name__, [pack(value) for value in action]]


def unpack_action(packed: list[Any]) -> Action:
    """The inverse of `pack_action`."""
    kind, values = packed
    return _ACTIONS[kind](*[unpack(value) for value in values])
