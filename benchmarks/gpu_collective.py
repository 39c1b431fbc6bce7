"""torchrun --standalone --nproc-per-node 2 -m benchmarks.gpu_collective [--updates 60] [--device cpu]

Processes that share one GPU train the same small net as on the CPU, under every policy of `quorate.DataParallel`; the
parameters must agree within tolerance, and be the same in all processes. Gradients go over gloo, since NCCL refuses two
processes on one GPU; with --nproc-per-node 1 they go over NCCL. Prints a line of JSON for each case. Without a GPU
each case is trained twice on the CPU, which must give the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import quorate

#: Smooth activations: where a ReLU or a maximum tips over, rounding alone drives two runs apart.
SAMPLES = 32


def net() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),  # a bias before BatchNorm has only noise for a gradient
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * 64, 256),
        nn.GELU(),
        nn.Linear(256, 10),
    )


def trained(device: str, updates: int, policy: quorate.Policy, kind: str, **options: Any) -> dict[str, Any]:
    """Train for some updates; gives the parameters, on the CPU."""
    model = net().to(device)
    makers: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
    }
    optimizer = makers[kind]()
    parallel = quorate.DataParallel(model, optimizer, policy, check_every=10, **options)
    drawn = torch.Generator().manual_seed(100 + parallel.worker)
    began = time.monotonic()
    for _ in range(updates):
        x = torch.randn(SAMPLES, 3, 32, 32, generator=drawn).to(device)
        y = torch.randint(0, 10, (SAMPLES,), generator=drawn).to(device)
        loss = nn.functional.cross_entropy(parallel(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    parallel.finish()
    state = {name: tensor.detach().double().cpu() for name, tensor in model.state_dict().items()}
    digest = parallel.check_identical()
    return {"state": state, "digest": digest, "seconds": time.monotonic() - began, "loss": loss.item()}


def furthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of any tensor, relative to its largest entry, and which it is."""
    return max(
        (float((ours[name] - theirs[name]).abs().max() / (theirs[name].abs().max() + 1e-12)), name) for name in ours
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    devices = ["cpu", options.device, *([] if options.device == "cpu" else [options.device])]
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1 and options.device != "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if alone else "gloo")
    workers = dist.get_world_size()
    cases: list[tuple[str, quorate.Policy, str, dict[str, Any]]] = [
        ("full sync, SGD", quorate.FullSync(), "sgd", {}),
        ("full sync, AdamW, clipped", quorate.FullSync(), "adamw", {"clip_norm": 0.5}),
        ("full sync, small buckets", quorate.FullSync(), "sgd", {"bucket_bytes": 20_000}),
        ("delayed 1", quorate.Delayed(1), "sgd", {}),
        ("delayed 2", quorate.Delayed(2), "sgd", {}),
        ("backup, all in the quorum", quorate.BackupSync(workers, 0), "sgd", {}),
    ]
    for name, policy, kind, extra in cases:
        runs = [trained(device, options.updates, policy, kind, **extra) for device in devices]
        if dist.get_rank() == 0:
            found: dict[str, Any] = {"case": name, "devices": devices, "loss": [run["loss"] for run in runs]}
            found["relative difference"] = furthest(runs[1]["state"], runs[0]["state"])
            found["twice on the last device"] = furthest(runs[-1]["state"], runs[-2]["state"])
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
