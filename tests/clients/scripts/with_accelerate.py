"""A text classifier with Hugging Face Accelerate, in the style of its examples.

A linear schedule with warm-up, made of `len(loader)` before anything is prepared; gradient accumulation and clipping by
the accelerator; accuracy by `gather_for_metrics`; `save_state` after every epoch; the plain model saved at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import quorate
from quorate.data_parallel.integrations.accelerate import prepare
from tests.clients.harness import Case, run, same_everywhere, values

EPOCHS, BATCH, ACCUMULATE = 2, 4, 2
SAMPLES, TESTED, WORDS, LENGTH = 96, 22, 30, 6  # the tested ones do not divide evenly


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, text: Tensor) -> Tensor:
        out: Tensor = self.layers(self.words(text).mean(1))
        return out


def texts(count: int, seed: int) -> TensorDataset:
    words = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, (words.float().mean(1) > WORDS / 2).long())


ACCELERATOR = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)


def script(case: Case, folder: Path) -> dict[str, Any]:
    accelerator = ACCELERATOR
    accelerator.free_memory()
    train, test = texts(SAMPLES, 1), texts(TESTED, 2)
    net = Classifier()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=2e-2, eps=1e-4)
    options: dict[str, Any] = {}
    if case.samples:
        options["sampler"] = quorate.Sampler(train, BATCH, accumulate=ACCUMULATE)
        loader: Any = DataLoader(train, batch_sampler=options["sampler"])
    else:
        loader = DataLoader(train, batch_size=BATCH, shuffle=False)
    test_loader: Any = DataLoader(test, batch_size=BATCH)
    steps = EPOCHS * len(loader) // ACCUMULATE
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 3, max(0.05, 1 - step / steps))
    )
    if case.policy is None:
        model, optimizer, loader, test_loader, schedule = accelerator.prepare(
            net, optimizer, loader, test_loader, schedule
        )
    else:
        model, optimizer, loader, test_loader, schedule = prepare(
            accelerator, net, optimizer, loader, test_loader, schedule, policy=case.policy(), **options
        )

    scores, used = [], []
    for epoch in range(EPOCHS):
        model.train()
        used.append(0)
        for text, label in loader:
            case.dawdle()
            with accelerator.accumulate(model):
                loss = cross_entropy(model(text), label)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and (case.is_ddp or model.receipt.applied):
                used[-1] += 1
        model.eval()
        right = total = 0
        for text, label in test_loader:
            with torch.no_grad():
                guess = model(text).argmax(-1)
            guesses, labels = accelerator.gather_for_metrics((guess, label))
            right, total = right + int((guesses == labels).sum()), total + len(labels)
        assert total == TESTED
        scores.append(right / total)
        accelerator.save_state(str(folder / f"{case.name} {epoch}"))

    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    accelerator.save_model(model, str(folder / f"{case.name} model"))
    accelerator.wait_for_everyone()
    if not case.is_ddp:
        model.finish()
    fresh = Classifier()
    fresh.load_state_dict(load_file(folder / f"{case.name} model" / "model.safetensors"))
    return {
        "values": values(net),
        "same": same_everywhere(net),
        "saved": values(fresh) == values(net),
        "unwrapped": unwrapped is net,
        "names": sorted(accelerator.get_state_dict(model)),
        "scores": scores,
        "used": used,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(script)
    ACCELERATOR.end_training()
