"""Hugging Face Accelerate: `prepare` stands where `accelerator.prepare` stood.

Accelerate wraps a model in DDP of its own accord. Here it does everything else (devices, mixed precision, gradient
accumulation, scaling, sharding of data loaders), and the wrapping is ours.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from quorate.errors import BadInput
from quorate.parallel.data_parallel import DataParallel
from quorate.parallel.sampler import Sampler
from quorate.policies import Policy

try:
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
except ImportError as error:
    raise ImportError("Accelerate is not installed; type: pip install 'quorate[accelerate]'") from error


def prepare(
    accelerator: Accelerator,
    net: nn.Module,
    optimizer: Optimizer,
    *others: Any,
    policy: Policy | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """The model, the optimizer and the others (data loaders, schedulers), ready to train; in the order given.

    net and optimizer: as they are before Accelerate prepares them.
    options: those of `quorate.DataParallel`, such as `sampler` and `trace`.

    `accelerator.backward`, `accumulate(model)`, `clip_grad_norm_` and `save_state` work as ever; what became of a step
    is in `model.receipt`. A loader that draws from a `quorate.Sampler` is left to it: it knows whose sample is whose.
    """
    _check(accelerator, net, optimizer)
    # Evaluation needs no DDP, but the right device, mixed precision and torch.compile: just what is wanted here.
    model = DataParallel(accelerator.prepare_model(net, evaluation_mode=True), optimizer, policy, **options)
    return model, accelerator.prepare(optimizer), *(_prepared(accelerator, other) for other in others)


def _prepared(accelerator: Accelerator, other: Any) -> Any:
    if not isinstance(other, DataLoader) or not isinstance(other.batch_sampler, Sampler):
        return accelerator.prepare(other)
    on_device = accelerator.device if accelerator.device_placement else None
    loader = prepare_data_loader(other, on_device, 1, 0, put_on_device=on_device is not None, dispatch_batches=False)
    accelerator._dataloaders.append(loader)
    return loader


def _check(accelerator: Accelerator, net: nn.Module, optimizer: Optimizer) -> None:
    if not isinstance(accelerator, Accelerator):
        raise BadInput(f"accelerator is a {type(accelerator).__name__}; prepare(Accelerator(), net, optimizer, …)")
    if isinstance(net, DataParallel):
        raise BadInput("the model is a quorate.DataParallel already; give prepare() the module that is inside")
    if getattr(net, "_is_accelerate_prepared", False) or isinstance(net, nn.parallel.DistributedDataParallel):
        raise BadInput("the model is prepared by Accelerate already; give it to quorate's prepare() only")
    if not accelerator.use_distributed:
        raise BadInput(
            "Accelerate runs in one process here; start the script in several: torchrun --nproc-per-node 2 script.py"
        )
