"""Hugging Face Accelerate: `prepare` replaces `accelerator.prepare`.

Accelerate itself would wrap the model in DDP. `prepare` wraps it in `quorate.DataParallel` instead; Accelerate does the
rest (devices, mixed precision, gradient accumulation, scaling, sharding of data loaders).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from quorate.data_parallel.integrations import TrainedModels, inside
from quorate.data_parallel.module import DataParallel
from quorate.data_parallel.sampler import Sampler
from quorate.errors import BadInput, install_line
from quorate.policies import Policy

try:
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
except ImportError as error:
    raise ImportError(f"Accelerate is not installed; type: {install_line('accelerate')}") from error

#: Accelerator methods in which all processes take part.
_COLLECTIVES = (
    "gather gather_for_metrics reduce pad_across_processes wait_for_everyone check_trigger save_state load_state"
)


def prepare(
    accelerator: Accelerator,
    net: nn.Module,
    optimizer: Optimizer,
    *others: Any,
    policy: Policy | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Prepare the model, the optimizer and the others (data loaders, schedulers); returned in the order given.

    net and optimizer: not yet prepared by Accelerate.
    options: of `quorate.DataParallel`, such as `sampler` and `out`.

    `accelerator.backward`, `accumulate(model)`, `clip_grad_norm_`, `unwrap_model` and `save_state` work as usual. The
    result of a step is in `model.receipt`. All processes reach the same version before they gather, reduce, wait or
    save. A loader with a `quorate.Sampler` is not sharded: the sampler assigns the samples to the processes.
    """
    _check(accelerator, net, optimizer)
    # In evaluation mode Accelerate applies device, mixed precision and torch.compile, but not DDP.
    model = DataParallel(accelerator.prepare_model(net, evaluation_mode=True), optimizer, policy, **options)
    trained_models_of(accelerator).add(model)
    return model, accelerator.prepare(optimizer), *(prepare_other(accelerator, other) for other in others)


def trained_models_of(accelerator: Accelerator) -> TrainedModels:
    """The models of an accelerator. The first call patches it: models meet before collectives, and unwrapping works."""
    models: TrainedModels | None = vars(accelerator).get("_quorate")
    if models is None:
        models = accelerator._quorate = TrainedModels()
        for name in _COLLECTIVES.split():
            setattr(accelerator, name, models.meet_before(getattr(accelerator, name)))
        unwrap = accelerator.unwrap_model
        accelerator.unwrap_model = lambda model, *rest, **named: unwrap(inside(model), *rest, **named)
    return models


def prepare_other(accelerator: Accelerator, other: Any) -> Any:
    """`accelerator.prepare(other)`, but a loader with a `quorate.Sampler` is not sharded."""
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
