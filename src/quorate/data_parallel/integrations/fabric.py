"""Lightning Fabric: a strategy, `Fabric(devices=4, strategy=QuorateStrategy(quorate.BackupSync(3, 1)))`.

It works like Fabric's DDP strategy, but `fabric.setup(model, optimizer)` wraps the model in `quorate.DataParallel`,
and `optimizer.step()` returns its receipt. All processes reach the same version before `fabric.all_reduce`,
`all_gather`, `broadcast`, `barrier` and `save`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from quorate.data_parallel.integrations import TrainedModels, inside
from quorate.data_parallel.module import DataParallel
from quorate.errors import BadInput, install_line
from quorate.policies import Policy

try:
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
except ImportError as error:
    raise ImportError(f"Lightning Fabric is not installed; type: {install_line('fabric')}") from error


class QuorateStrategy(DDPStrategy):  # type: ignore[misc]
    """Trains the model and optimizer given to `fabric.setup` under a policy.

    policy: as for `quorate.DataParallel`; the default is full sync.
    launch: arguments of Fabric's DDP strategy about processes, such as `start_method`.
    options: of `quorate.DataParallel`, such as `sampler`, `clip_norm` and `out`.
    """

    def __init__(self, policy: Policy | None = None, *, launch: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**(launch or {}))
        self._policy, self._options = policy, options
        self._backward_sync_control = _NoSync()
        self._models = TrainedModels()

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if len(optimizers) != 1:
            raise BadInput(f"fabric.setup got {len(optimizers)} optimizers; give a model and the one that updates it")
        model = DataParallel(module, optimizers[0], self._policy, **self._options)
        self._models.add(model)
        return model, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """A model without an optimizer can only be evaluated; it is returned unchanged."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise BadInput(
                "the model must be set up together with its optimizer: fabric.setup(model, optimizer); "
                "if it is not trained, call model.requires_grad_(False) first"
            )
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise BadInput("the optimizer must be set up together with its model: fabric.setup(model, optimizer)")

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = super().get_module_state_dict(inside(module))
        return state

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(inside(module), state_dict, strict=strict)

    def all_reduce(self, *arguments: Any, **named: Any) -> Any:
        return self._models.meet_and_call(super().all_reduce, *arguments, **named)

    def all_gather(self, *arguments: Any, **named: Any) -> Any:
        return self._models.meet_and_call(super().all_gather, *arguments, **named)

    def barrier(self, *arguments: Any, **named: Any) -> None:
        self._models.meet_and_call(super().barrier, *arguments, **named)

    def broadcast(self, *arguments: Any, **named: Any) -> Any:
        return self._models.meet_and_call(super().broadcast, *arguments, **named)

    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        self._models.meet_and_call(super().save_checkpoint, *arguments, **named)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """No registration by name: the strategy needs a policy."""


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    """`fabric.no_backward_sync(model)`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return data_parallel(module).no_sync() if enabled else nullcontext()


def data_parallel(model: nn.Module) -> DataParallel:
    """The `quorate.DataParallel` inside the model from `fabric.setup`: for `receipt`, `iteration()` and `finish()`."""
    found: Any = model
    while not isinstance(found, DataParallel):
        parts = found.__dict__.get("_modules", {})
        found = parts.get("_forward_module", parts.get("_orig_mod"))
        if found is None:
            raise BadInput(
                f"there is no quorate.DataParallel in this {type(model).__name__}; give what fabric.setup(model, "
                f"optimizer) returned, of a Fabric whose strategy is a QuorateStrategy"
            )
    return found
