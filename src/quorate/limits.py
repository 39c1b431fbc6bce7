"""When a run ends, and how often it is evaluated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quorate.conditions import Until, parse_until
from quorate.errors import BadInput, check_at_least
from quorate.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a run ends, and how often it is evaluated."""

    updates: int | None = None
    epochs: int | None = None
    until: str | Until | None = None
    evaluate_every: int | None = None

    def __post_init__(self) -> None:
        if self.updates is None and self.epochs is None and self.until is None:
            raise BadInput("a run needs an end: give updates, epochs or until")
        for name in ("updates", "epochs", "evaluate_every"):
            if getattr(self, name) is not None:
                check_at_least(name, getattr(self, name), 1)
        if isinstance(self.until, str):
            object.__setattr__(self, "until", parse_until(self.until))

    def options(self) -> dict[str, Any]:
        """As a trace records them."""
        condition = self.condition()
        until = None if condition is None else condition.text()
        return {"updates": self.updates, "epochs": self.epochs, "until": until}

    def condition(self) -> Until | None:
        assert not isinstance(self.until, str)
        return self.until

    def expected_updates(self, ledger: Ledger, per_update: int) -> int | None:
        """How many updates the run has, as far as that is known beforehand."""
        if self.updates is not None:
            return self.updates
        if self.epochs is None or ledger.batches_per_epoch is None:
            return None
        return self.epochs * math.ceil(ledger.batches_per_epoch / per_update)
