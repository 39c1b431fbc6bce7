"""Lightning Fabric: a strategy, `Fabric(devices=4, strategy=QuorateStrategy(quorate.BackupSync(3, 1)))`.

Everything is as with Fabric's DDP strategy, but `fabric.setup(model, optimizer)` wraps the model in
`quorate.DataParallel`, and `optimizer.step()` gives its receipt.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from quorate.errors import BadInput
from quorate.parallel.data_parallel import DataParallel
from quorate.policies import Policy

try:
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
except ImportError as error:
    raise ImportError("Lightning Fabric is not installed; type: pip install 'quorate[fabric]'") from error


class QuorateStrategy(DDPStrategy):  # type: ignore[misc]
    """Trains the one model and optimizer that `fabric.setup` gets, as a policy says.

    policy: as for `quorate.DataParallel`; full sync if none is given.
    launch: further arguments of Fabric's DDP strategy that have to do with processes, such as `start_method`.
    options: those of `quorate.DataParallel`, such as `sampler`, `clip_norm` and `trace`.
    """

    def __init__(self, policy: Policy | None = None, *, launch: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**(launch or {}))
        self._policy, self._options = policy, options
        self._backward_sync_control = _NoSync()

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        if len(optimizers) != 1:
            raise BadInput(f"fabric.setup got {len(optimizers)} optimizers; give a model and the one that updates it")
        return DataParallel(module, optimizers[0], self._policy, **self._options), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Of a model without an optimizer; one that is only evaluated stays as it is."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise BadInput(
                "the model must be set up together with its optimizer: fabric.setup(model, optimizer); "
                "if it is not trained, call model.requires_grad_(False) first"
            )
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise BadInput("the optimizer must be set up together with its model: fabric.setup(model, optimizer)")

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        state: dict[str, Any] = super().get_module_state_dict(_inside(module))
        return state

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        super().load_module_state_dict(_inside(module), state_dict, strict=strict)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """It is made by name nowhere: a policy has to be given."""


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    """`fabric.no_backward_sync(model)`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        return data_parallel(module).no_sync()


def data_parallel(model: nn.Module) -> DataParallel:
    """The `quorate.DataParallel` inside what `fabric.setup` gave: for `receipt`, `iteration()` and `finish()`."""
    found: Any = model
    while not isinstance(found, DataParallel):
        inside = found.__dict__.get("_modules", {})
        found = inside.get("_forward_module", inside.get("_orig_mod"))
        if found is None:
            raise BadInput(
                f"there is no quorate.DataParallel in this {type(model).__name__}; give what fabric.setup(model, "
                f"optimizer) returned, of a Fabric whose strategy is a QuorateStrategy"
            )
    return found


def _inside(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DataParallel) else module
