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

    def share(self, updates: int, seconds: float, samples: int, samples_per_epoch: int | None) -> float | None:
        """How much of the run is done, by the limit that it is nearest to; None where no end can be foreseen.

        Epochs are counted in samples, since how many updates they make may change while the run goes on.
        """
        done = -1.0  # asked after every update, of which a simulated run has many
        if self.updates is not None:
            done = updates / self.updates
        if self.epochs is not None and samples_per_epoch:
            done = max(done, samples / (self.epochs * samples_per_epoch))
        if self.until is not None:
            done = max(done, self._share_until(updates, seconds, samples))
        return None if done < 0 else min(1.0, done)

    def _share_until(self, updates: int, seconds: float, samples: int) -> float:
        until = self.condition()
        reached = {"updates": updates, "seconds": seconds, "samples": samples}
        if until is None or until.name not in reached or until.relation != ">=" or until.target <= 0:
            return -1.0
        return reached[until.name] / until.target
