"""Parser of latency texts: `MODEL:ARGUMENTS`, any number of `*MODIFIER:ARGUMENTS`, and switches `->SECONDS->`."""

from __future__ import annotations

from collections.abc import Callable

from quorate.errors import BadInput, unknown_name
from quorate.latency.base import Latency
from quorate.latency.chen2016 import Chen2016
from quorate.latency.laws import Constant, Lognormal, Pareto, Pause, Quantiles, ShiftedExponential
from quorate.latency.modifiers import Changing, Pauses, Slow, Spells
from quorate.latency.recorded import Recorded

_CHANGE = "->"


def parse_latency(text: str) -> Latency:
    """The model that a text such as ``shifted-exp:0.05,0.025*slow:3=4`` describes."""
    parts = text.split(_CHANGE)
    if len(parts) == 1:
        return _unchanging(text)
    if len(parts) % 2 == 0:
        raise BadInput(f"{text!r} lacks a time or a model between two {_CHANGE!r}; {Changing.usage()}")
    times_s = tuple(_number(Changing, word) for word in parts[1::2])
    return Changing(tuple(_unchanging(part) for part in parts[::2]), times_s)


def _unchanging(text: str) -> Latency:
    first, *rest = text.split("*")
    name, arguments = _named(first)
    if name in _MODIFIERS:
        raise BadInput(
            f"{first.strip()!r} changes another model and cannot come first; "
            f"write for example constant:0.05*{first.strip()}"
        )
    if name not in _MODELS:
        raise unknown_name("latency model", name, _MODELS)
    model = _MODELS[name](arguments)
    for part in rest:
        name, arguments = _named(part)
        if name not in _MODIFIERS:
            raise unknown_name("latency modifier", name, _MODIFIERS)
        model = _MODIFIERS[name](model, arguments)
    return model


def _named(part: str) -> tuple[str, str]:
    name, _, arguments = part.partition(":")
    return name.strip(), arguments.strip()


def _number(kind: type[Latency], word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise BadInput(f"{word.strip()!r} in {kind.name} is not a number; {kind.usage()}") from None


def _numbers(kind: type[Latency], arguments: str, least: int, most: int) -> list[float]:
    words = arguments.split(",") if arguments else []
    if not least <= len(words) <= most:
        wanted = f"{least}" if least == most else f"{least} to {most}"
        raise BadInput(
            f"{kind.name} takes {wanted} number{'' if most == 1 else 's'}, "
            f"not the {len(words)} in {arguments!r}; {kind.usage()}"
        )
    return [_number(kind, word) for word in words]


def _pairs(kind: type[Latency], arguments: str, sign: str) -> list[tuple[str, str]]:
    pairs = []
    for word in arguments.split(","):
        left, found, right = word.partition(sign)
        if not found:
            raise BadInput(f"{word.strip()!r} in {kind.name} has no {sign!r}; {kind.usage()}")
        pairs.append((left, right))
    return pairs


def _quantiles(arguments: str) -> Quantiles:
    pairs = _pairs(Quantiles, arguments, "@")
    return Quantiles(tuple((_number(Quantiles, left), _number(Quantiles, right)) for left, right in pairs))


def _slow(model: Latency, arguments: str) -> Slow:
    factors: dict[int, float] = {}
    for left, right in _pairs(Slow, arguments, "="):
        try:
            worker = int(left)
        except ValueError:
            raise BadInput(f"{left.strip()!r} in slow is not a worker number; {Slow.usage()}") from None
        if worker in factors:
            raise BadInput(f"slow names worker {worker} twice; give it one factor")
        factors[worker] = _number(Slow, right)
    return Slow(model, factors)


_MODELS: dict[str, Callable[[str], Latency]] = {
    Constant.name: lambda text: Constant(*_numbers(Constant, text, 1, 1)),
    ShiftedExponential.name: lambda text: ShiftedExponential(*_numbers(ShiftedExponential, text, 2, 2)),
    Lognormal.name: lambda text: Lognormal(*_numbers(Lognormal, text, 2, 2)),
    Pareto.name: lambda text: Pareto(*_numbers(Pareto, text, 2, 2)),
    Quantiles.name: _quantiles,
    Pause.name: lambda text: Pause(*_numbers(Pause, text, 3, 3)),
    Recorded.name: Recorded,
    Chen2016.name: lambda text: Chen2016(*_numbers(Chen2016, text, 0, 0)),
}

_MODIFIERS: dict[str, Callable[[Latency, str], Latency]] = {
    Slow.name: _slow,
    Pauses.name: lambda model, text: Pauses(model, *_numbers(Pauses, text, 2, 2)),
    Spells.name: lambda model, text: Spells(model, *_numbers(Spells, text, 3, 4)),
}
