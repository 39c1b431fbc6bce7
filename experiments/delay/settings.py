"""What is trained: nets, delays and repairs, each with its learning rates to try."""

from __future__ import annotations

from dataclasses import dataclass, replace

NETS = ("alexnet", "googlenet")
DELAYS = (0, 1, 2, 4)
SEEDS = (1, 2, 3)
TUNING_SEED = 0
WORKERS = 4
MOMENTUM = 0.9

#: What is done about a delay. "none" has the learning rate that is best without a delay; all others one of their own.
REPAIRS = ("none", "lr", "warm-up", "momentum", "compensation")
REPAIRED_DELAY = 4
WARM_UP_SHARE = 0.25
LOWER_MOMENTUM = 0.5
#: Learning rates are tried from here in factors of 2. A quadratic bowl with momentum 0.9 stays stable up to a rate that
#: is 5, 17 and 42 times lower at delays of 1, 2 and 4 (stability.py); the grids go down somewhat less.
_LEAST_RATE = {"alexnet": 0.02, "googlenet": 0.1}
_LOWER_BY = {0: 1, 1: 4, 2: 8, 4: 16}
_RATES = 4
_COMPENSATIONS = (64.0, 1024.0)
#: Delays and repairs whose rate is tuned, those first that take longest.
METHODS = (
    *((REPAIRED_DELAY, repair) for repair in ("compensation", "warm-up", "momentum")),
    *((delay, "lr") for delay in DELAYS),
)


@dataclass(frozen=True, kw_only=True)
class Length:
    """How long and how large trainings are."""

    epochs: int
    tuning_epochs: int
    batch_size: int
    train_samples: int = 50_000
    test_samples: int = 10_000

    def updates(self, tuning: bool) -> int:
        """Rounds of WORKERS batches; the last one of an epoch takes what is left."""
        per_epoch = -(-self.train_samples // (self.batch_size * WORKERS))
        return per_epoch * (self.tuning_epochs if tuning else self.epochs)


FULL = {
    "alexnet": Length(epochs=16, tuning_epochs=5, batch_size=64),
    "googlenet": Length(epochs=12, tuning_epochs=4, batch_size=128),
}
QUICK = Length(epochs=2, tuning_epochs=1, batch_size=4, train_samples=32, test_samples=32)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One training. Of `compensation`, it is the λ of DC-ASGD."""

    net: str
    delay: int
    repair: str
    lr: float
    seed: int
    momentum: float = MOMENTUM
    compensation: float = 0.0

    @property
    def tuning(self) -> bool:
        return self.seed == TUNING_SEED

    @property
    def method(self) -> tuple[str, int, str]:
        return self.net, self.delay, self.repair


def tried(net: str, delay: int, repair: str) -> list[Setting]:
    """The trainings that choose the rate of a method: as many for each."""
    least = _LEAST_RATE[net] / _LOWER_BY[delay]
    rates = [least * 2**step for step in range(_RATES)]
    base = Setting(net=net, delay=delay, repair=repair, lr=least, seed=TUNING_SEED)
    if repair == "momentum":  # the same rates in the long run: rate / (1 − momentum)
        factor = (1 - LOWER_MOMENTUM) / (1 - MOMENTUM)
        return [replace(base, lr=rate * factor, momentum=LOWER_MOMENTUM) for rate in rates]
    if repair == "compensation":
        return [replace(base, lr=rate, compensation=value) for rate in rates[:2] for value in _COMPENSATIONS]
    return [replace(base, lr=rate) for rate in rates]


def further(settings: list[Setting], best: Setting, most: int) -> Setting | None:
    """One more rate to try where the best is at the edge of those tried; None where it is not, or `most` were tried."""
    if len(settings) >= most or best.repair == "compensation":
        return None
    rates = sorted(setting.lr for setting in settings)
    if best.lr == rates[0]:
        return replace(best, lr=rates[0] / 2)
    return replace(best, lr=rates[-1] * 2) if best.lr == rates[-1] else None
