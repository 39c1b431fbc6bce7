"""Makes models that must be refused, one after the other: `refused.py FOLDER CASE…`.

Every process writes FOLDER/refused<worker>.json: by case the error it got, or null.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import quorate
from tests.data_parallel.scripts.meeting import meet, say


def _model(module: nn.Module, policy: quorate.Policy | None = None, **options: Any) -> quorate.DataParallel:
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(module.parameters(), lr=0.1)
    return quorate.DataParallel(module, optimizer, policy, patience_s=20.0, **options)


def cases(worker: int, folder: Path) -> dict[str, Callable[[], Any]]:
    def net(odd: bool = False) -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4 if odd else 3))

    def named(name: str) -> nn.Module:
        module = nn.Module()
        setattr(module, name, nn.Parameter(torch.zeros(3)))
        return module

    def with_buffer(size: int) -> nn.Module:
        module = net()
        module.register_buffer("mean", torch.zeros(size))
        return module

    def sparse() -> None:
        module = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = quorate.DataParallel(module, optimizer, patience_s=20.0)
        try:
            model(torch.tensor([1, 2])).sum().backward()
        finally:
            model.abort()

    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    frozen = net().requires_grad_(False)
    adam = net()
    optimizer = (torch.optim.Adam if worker == 1 else torch.optim.SGD)(adam.parameters(), lr=0.1)
    one = net()
    lbfgs = torch.optim.LBFGS(one.parameters())
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "trace.jsonl").write_text("{}\n")
    return {
        "async": lambda: _model(net(), quorate.Async()),
        "softsync": lambda: _model(net(), quorate.SoftSync(2)),
        "bounded": lambda: _model(net(), quorate.BoundedStaleness(2)),
        "k-batch": lambda: _model(net(), quorate.KBatchSync(2)),
        "shape": lambda: _model(net(odd=worker == 1)),
        "name": lambda: _model(named("weight" if worker else "scale")),
        "number": lambda: _model(net() if worker else nn.Sequential(*net(), nn.Linear(3, 3))),
        "type": lambda: _model(net().double() if worker == 1 else net()),
        "buffer": lambda: _model(with_buffer(3 + worker)),
        "policy": lambda: _model(net(), quorate.Delayed(worker)),
        "optimizer differs": lambda: _model(adam, optimizer=optimizer),
        "quorum": lambda: _model(net(), quorate.BackupSync(3, 1)),
        "workers": lambda: _model(net(), quorate.BackupSync(1, 0)),
        "optimizer of others": lambda: _model(net(), optimizer=other),
        "no optimizer": lambda: quorate.DataParallel(net(), net().parameters()),  # type: ignore[arg-type]
        "lbfgs": lambda: _model(one, optimizer=lbfgs),
        "frozen": lambda: _model(frozen, optimizer=other),
        "sparse": sparse,
        "out": lambda: _model(net(), out=folder / "taken"),
        "check_every": lambda: _model(net(), check_every=0),
        "clip_norm": lambda: _model(net(), clip_norm=-1.0),
        "bucket_bytes": lambda: _model(net(), bucket_bytes=-5),
        "checkpoint_every": lambda: _model(net(), checkpoint=folder / "points", checkpoint_every=0),
        "patience": lambda: quorate.DataParallel(one, torch.optim.SGD(one.parameters(), lr=0.1), patience_s=-1.0),
    }


def main() -> None:
    worker, _ = meet()
    folder = Path(sys.argv[1])
    errors: dict[str, list[str] | None] = {}
    for name, make in cases(worker, folder).items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        say(name)
        try:
            make().abort()
            errors[name] = None
        except Exception as error:
            errors[name] = [type(error).__name__, str(error)]
        dist.barrier()
    (folder / f"refused{worker}.json").write_text(json.dumps(errors, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
