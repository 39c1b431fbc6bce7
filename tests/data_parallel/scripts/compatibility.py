"""Trains many kinds of models with DDP and with quorate in the same processes: `torchrun … THIS FOLDER CASE…`.

Every process writes FOLDER/WORKER.json: by case and policy the largest difference between the two, and what else a case
has seen. Data differs between the processes, so a gradient that is not averaged shows.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import quorate

STEPS = 10
Figures = dict[str, Any]
Wrap = Callable[..., nn.Module]
#: Trains with what `wrap(net, optimizer)` gives, and returns what must be equal to what DDP gives.
Case = Callable[[Wrap], tuple[list[Tensor], Figures]]
CASES: dict[str, Case] = {}
#: Where quorate means something else than DDP.
NOT_THE_SAME = [("scaler_and_clipping", "backup")]


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def wrap_in_ddp(net: nn.Module, optimizer: torch.optim.Optimizer, **_: Any) -> nn.Module:
    return DistributedDataParallel(net, find_unused_parameters=True)


def wrap_in_quorate(policy: Callable[[], quorate.Policy], made: list[quorate.DataParallel]) -> Wrap:
    def wrap(net: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        made.append(quorate.DataParallel(net, optimizer, policy(), patience_s=30.0))
        return made[-1]

    return wrap


def run(name: str, policy: Callable[[], quorate.Policy]) -> Figures:
    """One case with DDP and with this policy."""
    torch.manual_seed(0)
    expected, _ = CASES[name](wrap_in_ddp)
    made: list[quorate.DataParallel] = []
    torch.manual_seed(0)
    found, figures = CASES[name](wrap_in_quorate(policy, made))
    difference = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    for model in made:
        model.check_identical()
        model.finish()
    return {"difference": difference, "size": max(float(one.abs().max()) for one in expected), **figures}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    policies = {"full-sync": quorate.FullSync, "backup": lambda: quorate.BackupSync(dist.get_world_size(), 0)}
    results: Figures = {}
    for name, (policy, make) in product(names, policies.items()):
        if (name, policy) not in NOT_THE_SAME:
            began = time.perf_counter()
            try:
                results[f"{name} {policy}"] = run(name, make)
            except Exception:
                results[f"{name} {policy}"] = {"error": traceback.format_exc()}
            results[f"{name} {policy}"]["seconds"] = time.perf_counter() - began
            (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    if not sys.argv[2:]:
        results["iteration"] = after_a_step_nothing_is_skipped()
        results["late before forward"] = late_before_its_forward()
        (folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def after_a_step_nothing_is_skipped() -> Figures:
    """One process goes on; the other, in an `iteration()` and after its step, reads a parameter when it is late."""
    net = perceptron()
    optimizer = sgd(net)
    model = quorate.DataParallel(net, optimizer, quorate.BackupSync(1, 1), patience_s=30.0)
    store = dist.distributed_c10d._get_default_store()
    is_first, stepped, went_on = dist.get_rank() == 0, 0, 0
    while not (store.check(["went on"]) if is_first else stepped):
        if is_first:
            time.sleep(0.02)  # so that the other one now and then gets as far as its step
        with model.iteration():
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            stepped += 1
            while not is_first and not model.late:
                time.sleep(0.001)
            went_on += bool(net[0].weight.isfinite().all())
        optimizer.zero_grad()
    store.set("went on", "1")
    model.finish()
    return {"stepped": stepped, "went on": went_on}


def late_before_its_forward() -> Figures:
    """One process is late before its forward, from its first iteration on, and reads a parameter there."""
    net = perceptron()
    optimizer = sgd(net)
    model = quorate.DataParallel(net, optimizer, quorate.BackupSync(1, 1), patience_s=30.0)
    store = dist.distributed_c10d._get_default_store()
    is_first, reached, versions, receipts = dist.get_rank() == 0, [], [], []
    turn = 0
    if is_first:
        store.wait(["inside"])
    while not store.check(["all turns"]) if is_first else turn < 6:
        with model.iteration():
            if not is_first:
                store.set("inside", "1")
            end = time.monotonic() + 20.0
            while not is_first and turn % 2 == 0 and not model.late and time.monotonic() < end:
                time.sleep(0.001)
            for parameter in net.parameters():
                parameter.grad = None
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            reached.append(turn)
        assert model.receipt is not None
        versions.append(model.version)
        receipts.append(model.receipt.applied)
        turn += 1
        if is_first:
            time.sleep(0.005)
    store.set("all turns", "1")
    model.finish()
    return {"reached": reached, "versions": versions, "applied": receipts}


# ------------------------------------------------------------ what the cases share


def batches(*shape: int, steps: int = STEPS) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return (torch.randn(*shape, generator=generator) for _ in range(steps))


def tokens(*shape: int, steps: int = STEPS) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return (torch.randint(20, shape, generator=generator) for _ in range(steps))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in net.parameters() if one.requires_grad], lr=0.1, momentum=0.9)


def parameters(net: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in net.state_dict().values()]


def trained(net: nn.Module, wrap: Wrap, data: Iterator[Tensor], use: Callable[..., Any] | None = None) -> list[Tensor]:
    """The parameters after a plain loop; `use` turns the wrapped model into what is called."""
    optimizer = sgd(net)
    model = wrap(net, optimizer)
    called = model if use is None else use(model)
    for batch in data:
        called(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(net)


def perceptron(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), *between, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


# ------------------------------------------------------------ modules


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.recurrent, self.last = kind(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0])


@case
def lstm(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return trained(Recurrent(nn.LSTM), wrap, batches(4, 6, 8)), {}


@case
def gru(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return trained(Recurrent(nn.GRU), wrap, batches(4, 6, 8)), {}


class Tied(nn.Module):
    """The embedding is the last layer, too; and a layer reads the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.embedding(x)))
        hidden = torch.tanh(functional.linear(self.second(hidden), self.first.weight.t()))
        return functional.linear(self.third(hidden), self.embedding.weight)


@case
def tied_weights(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return trained(Tied(), wrap, tokens(4, 6)), {}


@case
def transformer(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    net = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return trained(net, wrap, batches(4, 6, 8)), {}


@case
def weight_norm(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    net = perceptron()
    nn.utils.parametrizations.weight_norm(net[2])
    return trained(net, wrap, batches(8, 8)), {}


@case
def frozen_parameters(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    net = perceptron()
    net[0].requires_grad_(False)
    return trained(net, wrap, batches(8, 8)), {}


@case
def dropout(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    torch.manual_seed(0)
    return trained(perceptron(nn.Dropout(0.3)), wrap, batches(8, 8)), {}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = perceptron(nn.Dropout(0.3)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=False))


@case
def activation_checkpointing(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return trained(Checkpointed(), wrap, batches(8, 8)), {}


@case
def batch_norm(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    """Its statistics are averaged, where DDP takes those of one process; what is learned must not differ."""
    net = perceptron(nn.BatchNorm1d(32))
    trained(net, wrap, batches(8, 8))
    return [one.detach().clone() for one in net.parameters()], {}


class Unused(nn.Module):
    """Each process uses another branch, and one branch nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.branches[dist.get_rank() % 2](x))


@case
def unused_parameters(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return trained(Unused(), wrap, batches(8, 8)), {}


# ------------------------------------------------------------ loops


@case
def bf16_autocast(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    def use(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def called(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return model(x).float()

        return called

    return trained(perceptron(), wrap, batches(8, 8), use), {}


def scaled(
    wrap: Wrap, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], clip_norm: float | None = None
) -> tuple[list[Tensor], Figures]:
    """With a scaler whose gradients are Inf once, in all processes."""
    net = perceptron()
    optimizer = optimizer_of(net)
    model = wrap(net, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    skipped = 0
    for step, batch in enumerate(batches(8, 8)):
        loss = model(batch).square().mean()
        scaler.scale(loss * float("inf") if step == 4 else loss).backward()
        if clip_norm is not None and step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        optimizer.zero_grad()
    return parameters(net), {"skipped": skipped}


@case
def scaler_that_skips(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return scaled(wrap, sgd)


@case
def scaler_and_fused_optimizer(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return scaled(wrap, lambda net: torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))


@case
def scaler_and_clipping(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    """Only where the average is there before the step: elsewhere it is `DataParallel(…, clip_norm=…)` that clips it."""
    return scaled(wrap, sgd, clip_norm=0.05)


@case
def averaged_model(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    net = perceptron(nn.BatchNorm1d(32, track_running_stats=False))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = wrap(net, optimizer)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for batch in batches(8, 8):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(net)
    return parameters(average.module), {}


@case
def gradients_kept_as_zeros(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    net = perceptron()
    optimizer = sgd(net)
    model = wrap(net, optimizer)
    for batch in batches(8, 8):
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()
    return parameters(net), {}


@case
def two_backwards(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    """Two losses, two backward passes and one step, without no_sync."""
    net = perceptron()
    optimizer = sgd(net)
    model = wrap(net, optimizer)
    for batch in batches(8, 8):
        model(batch).square().mean().backward()
        (model(batch + 1) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters(net), {}


@case
def accumulation(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    net = perceptron()
    optimizer = sgd(net)
    model = wrap(net, optimizer)
    for step, batch in enumerate(batches(8, 8, steps=2 * STEPS)):
        if step % 2 == 0:
            with model.no_sync():
                model(batch).square().mean().backward()
        else:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return parameters(net), {}


def scheduled(wrap: Wrap, made_first: bool) -> tuple[list[Tensor], Figures]:
    """With a scheduler that changes the momentum, too."""
    net = perceptron()
    optimizer = sgd(net)
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, optimizer, max_lr=0.2, total_steps=STEPS + 1)
    scheduler = schedule() if made_first else None
    model = wrap(net, optimizer)
    scheduler = scheduler or schedule()
    for batch in batches(8, 8):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return parameters(net), {}


@case
def scheduler_made_before(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return scheduled(wrap, True)


@case
def scheduler_made_after(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return scheduled(wrap, False)


@case
def evaluating_and_loading(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    """Between the steps the model is evaluated, saved, and set back to what was saved."""
    net = perceptron(nn.Dropout(0.0))
    optimizer = sgd(net)
    model = wrap(net, optimizer)
    scores, saved = [], None
    for step, batch in enumerate(batches(8, 8)):
        model.train()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            scores.append(model(torch.ones(1, 8)))
        if step == 3:
            saved = {key: value.clone() for key, value in model.state_dict().items()}
        if step == 6:
            assert saved is not None
            model.load_state_dict(saved)
    return [*parameters(net), *scores], {"keys": sorted(model.state_dict())}


@case
def two_models(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    """As in adversarial training: each has an optimizer of its own, and one's loss goes through the other."""
    generator, critic = perceptron(), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    for_generator, for_critic = sgd(generator), sgd(critic)
    trained_generator, trained_critic = wrap(generator, for_generator), wrap(critic, for_critic)
    for batch in batches(8, 8):
        made = trained_generator(batch)
        loss = trained_critic(made.detach()).square().mean() + (trained_critic(batch[:, :4]) - 1).square().mean()
        loss.backward()
        for_critic.step()
        for_critic.zero_grad()
        critic.requires_grad_(False)
        (critic(made) - 1).square().mean().backward()
        for_generator.step()
        for_generator.zero_grad()
        critic.requires_grad_(True)
    return [*parameters(generator), *parameters(critic)], {}


# ------------------------------------------------------------ torch.compile

BACKEND = os.environ.get("COMPILE_BACKEND", "aot_eager")  # "inductor" calls a C++ compiler, which takes its time


def compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend=BACKEND)


@case
def compiled_outside(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    return trained(perceptron(), wrap, batches(8, 8), compiled), {}


@case
def compiled_inside(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    net = perceptron()
    trained(compiled(net), wrap, batches(8, 8))
    return parameters(net), {}


@case
def compiled_in_place(wrap: Wrap) -> tuple[list[Tensor], Figures]:
    net = perceptron()
    net[2].compile(backend=BACKEND)
    return trained(net, wrap, batches(8, 8)), {}


if __name__ == "__main__":
    main()
