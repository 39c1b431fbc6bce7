"""A language model trained by iterations: gradient accumulation by `require_backward_grad_sync`, no data loader.

In the style of small GPT trainers: random windows of one long text, a cosine schedule that the loop writes into the
parameter groups, gradient clipping, and process 0 that evaluates and saves while the others go on.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import quorate
from tests.clients.harness import Case, Traffic, run, same_everywhere, values

ITERATIONS, ACCUMULATE, EVALUATE_EVERY, WARM_UP = 12, 2, 4, 3
BATCH, WINDOW, LETTERS, WIDTH = 4, 8, 11, 16
RATE, LOWEST_RATE = 3e-2, 3e-3
TRAFFIC = Traffic()


class Model(nn.Module):
    """One causal attention block; the logits share the embedding's weight. Gives logits and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.think = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, text: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.letters(text) + self.places(torch.arange(text.shape[1]))
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = self.head(x + self.think(x))
        return logits, cross_entropy(logits.view(-1, LETTERS), targets.view(-1))


def rate_at(iteration: int) -> float:
    if iteration < WARM_UP:
        return RATE * (iteration + 1) / (WARM_UP + 1)
    part = (iteration - WARM_UP) / (ITERATIONS - WARM_UP)
    return LOWEST_RATE + 0.5 * (1 + math.cos(math.pi * part)) * (RATE - LOWEST_RATE)


def script(case: Case, folder: Path) -> dict[str, Any]:
    master = dist.get_rank() == 0
    text = (torch.arange(4000) * torch.arange(4000) // 7) % LETTERS
    net = Model()
    decayed = [one for one in net.parameters() if one.dim() > 1]
    rest = [one for one in net.parameters() if one.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    draw = torch.Generator().manual_seed(1337 + dist.get_rank())  # another part of the text in every process

    def get_batch() -> tuple[Tensor, Tensor]:
        case.dawdle()
        places = torch.randint(len(text) - WINDOW - 1, (BATCH,), generator=draw).tolist()
        return tuple(torch.stack([text[at + on : at + on + WINDOW] for at in places]) for on in (0, 1))  # type: ignore[return-value]

    model: Any
    if case.policy is None:
        model, iterations = DistributedDataParallel(net), range(ITERATIONS)
    else:
        model = quorate.DataParallel(net, optimizer, case.policy())
        iterations = model.steps(ITERATIONS, meet_every=EVALUATE_EVERY)
    raw_model = model.module

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        x, y = text[None, :WINDOW], text[None, 1 : WINDOW + 1]
        loss = float(model(x, y)[1])
        model.train()
        return loss

    saved = folder / f"{case.name}.pt"
    losses, computed, sent_before = [], 0, TRAFFIC.elements
    x, y = get_batch()  # the very first one
    for iteration in iterations:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(iteration)
        if iteration % EVALUATE_EVERY == 0 and master:
            losses.append(estimate_loss())
            torch.save(
                {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iteration": iteration}, saved
            )
        for micro_step in range(ACCUMULATE):
            model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
            _, loss = model(x, y)
            x, y = get_batch()  # while the device would be busy
            (loss / ACCUMULATE).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        computed += 1

    if not case.is_ddp:
        model.finish()
    checkpoint = torch.load(saved) if master else None
    return {
        "values": values(net),
        "same": same_everywhere(net),
        "losses": losses,
        "computed": computed,
        "versions": ITERATIONS if case.is_ddp else model.version,
        "sent": TRAFFIC.elements - sent_before,
        "names": sorted(checkpoint["model"]) if checkpoint else sorted(net.state_dict()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(script)
    dist.destroy_process_group()
