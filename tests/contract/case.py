"""One run of the contract suite, as a value that can be sent to other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from quorate.policies import Policy
from tests.toy_tasks import mlp

WORKERS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """`Toy(make)` under a policy on `WORKERS` workers, with a trace in the folder `out`."""

    policy: Policy
    out: Path
    epochs: int | None = None
    updates: int | None = None
    make: Callable[[], nn.Module] = mlp
