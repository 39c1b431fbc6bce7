"""Fabric with its DDP strategy and with quorate's in the same processes: `torchrun … with_fabric.py FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

import quorate
from quorate.data_parallel.integrations.fabric import QuorateStrategy, data_parallel


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def trained(fabric: Fabric) -> tuple[list[Tensor], Any, Any, Any]:
    """Two batches a step, clipped."""
    net, optimizer = parts()
    model, optimizer = fabric.setup(net, optimizer)
    generator = torch.Generator().manual_seed(100 + fabric.global_rank)
    receipt = None
    for step in range(20):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            fabric.backward(model(torch.randn(8, 8, generator=generator)).square().mean())
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.05)
            receipt = optimizer.step()
            optimizer.zero_grad()
    return [one.detach().clone() for one in net.parameters()], model, optimizer, receipt


def refused(function: Callable[[], Any]) -> str:
    try:
        function()
    except quorate.BadInput as error:
        return str(error)
    return "nothing"


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    theirs = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    theirs.launch()
    expected, their_model, *_ = trained(theirs)
    ours = Fabric(accelerator="cpu", devices=2, strategy=QuorateStrategy())
    ours.launch()
    found, model, optimizer, receipt = trained(ours)
    file = folder / "checkpoint"
    ours.save(file, {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    ours.load(file, {"model": model, "optimizer": optimizer})
    loaded = [one.detach() for one in model.parameters()]
    net, raw = parts()
    result = {
        "difference": max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)),
        "loaded": all(torch.equal(one, other) for one, other in zip(found, loaded, strict=True)),
        "names": sorted(torch.load(file)["model"]),
        "updates": receipt.version,
        "not trained": type(ours.setup_module(parts()[0].requires_grad_(False))).__name__,
        "refused": [
            refused(lambda: ours.setup_module(net)),
            refused(lambda: ours.setup_optimizers(raw)),
            refused(lambda: ours.setup(net, raw, torch.optim.SGD(net.parameters(), lr=0.1))),
            refused(lambda: data_parallel(their_model)),
        ],
    }
    data_parallel(model).finish()
    (folder / f"{ours.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
