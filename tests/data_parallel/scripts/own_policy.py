"""Trains under a policy that is not quorate's: `own_policy.py FOLDER`; one of FOLDER/own_policies.py is among them.

Every process writes FOLDER/seen<worker>.json: by case the digest at the end, or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import quorate
from quorate.events import Action, Apply
from quorate.user_code import policy_class
from tests.data_parallel.scripts.meeting import meet
from tests.own_policies import WarmUpBackup
from tests.own_policy_run import POLICY


class Weighing(WarmUpBackup):
    """Breaks the rule of the collective engine at version 4."""

    weighs = True

    def close(self, time: float) -> list[Action]:
        actions = list(super().close(time))
        if self.version < 5:
            return actions
        return [one._replace(weights=(2.0,) * len(one.tickets)) if isinstance(one, Apply) else one for one in actions]


class NotFull(quorate.FullSync):
    """Inherits from full sync, but is none: the processes must wait for its decisions."""

    @property
    def per_update(self) -> int:
        return self.workers - 1


def train(policy: quorate.Policy | str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = quorate.DataParallel(net, optimizer, policy, out=folder, check_every=1, patience_s=20.0)
    used = []
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        receipt = optimizer.step()
        used.append(receipt.applied)
        if receipt.over:
            break
    model.finish()
    return {"digest": model.digest(), "used": used}


def main() -> None:
    folder, (worker, _) = Path(sys.argv[1]), meet()
    seen: dict[str, Any] = {}
    cases = {
        "own": WarmUpBackup(2, warm_up=3),
        "by-file": policy_class(f"{folder / POLICY}")(quorum=2, warm_up=3),
        "not-full": NotFull(),
        "by-name": "full-sync",
        "weighing": Weighing(2),
    }
    for name, policy in cases.items():
        try:
            seen[name] = train(policy, folder / name)
        except quorate.QuorateError as error:
            seen[name] = {"error": str(error)}
    (folder / f"seen{worker}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
