"""Accelerate with its own DDP and with quorate in the same processes: `torchrun … with_accelerate.py FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quorate
from quorate.data_parallel.integrations.accelerate import prepare

Prepare = Callable[..., tuple[Any, ...]]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(torch.randn(96, 8), torch.randn(96, 4)), batch_size=8, shuffle=False)
    return net, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def trained(accelerator: Accelerator, prepare_all: Prepare) -> tuple[list[Tensor], int, Any]:
    """Two batches a step, clipped, scheduled; the scaler sees Inf once."""
    net, optimizer, loader, scheduler = parts()
    model, optimizer, loader, scheduler = prepare_all(net, optimizer, loader, scheduler)
    skipped, step = 0, 0
    for _ in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss * float("inf") if step == 5 else loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            skipped += accelerator.sync_gradients and accelerator.optimizer_step_was_skipped
            step += 1
    return [one.detach().clone() for one in net.parameters()], int(skipped), model


def refused(function: Callable[[], Any]) -> str:
    try:
        function()
    except quorate.BadInput as error:
        return str(error)
    return "nothing"


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)  # which Accelerate makes for GPUs only
    expected, skipped_there, _ = trained(accelerator, accelerator.prepare)
    accelerator.free_memory()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    found, skipped, model = trained(accelerator, lambda *given: prepare(accelerator, *given))
    accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()  # only one of them writes
    saved = [one.detach().clone() for one in model.parameters()]
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    accelerator.load_state(str(folder / "state"))
    loaded = [one.detach() for one in model.parameters()]
    net, optimizer, loader, _ = parts()
    result = {
        "difference": max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)),
        "skipped": [skipped_there, skipped],
        "updates": model.receipt.version,
        "loaded": all(torch.equal(one, other) for one, other in zip(saved, loaded, strict=True)),
        "refused": [
            refused(lambda: prepare(accelerator, model, optimizer)),
            refused(lambda: prepare(accelerator, accelerator.prepare(parts()[0]), optimizer)),
            refused(lambda: prepare(loader, net, optimizer)),
            refused(lambda: quorate.DataParallel(net, accelerator.prepare(optimizer))),
        ],
    }
    model.finish()
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(result))
    accelerator.end_training()


if __name__ == "__main__":
    main()
