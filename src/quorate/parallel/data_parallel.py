"""A drop-in for DistributedDataParallel: the same script, but a slow process no longer holds the others up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quorate.engines.collective.comparing import check_same_model, check_same_values
from quorate.engines.collective.free_running import FreeRunning
from quorate.engines.collective.groups import Processes, check_there_is_a_group
from quorate.engines.collective.hooks import GradientHooks, buffers_of
from quorate.engines.collective.layout import Layout
from quorate.engines.collective.partial_steps import PartialSteps
from quorate.engines.collective.reading import Guard
from quorate.engines.collective.receipts import Receipt
from quorate.errors import BadInput
from quorate.parallel.stepping import Takeover
from quorate.policies import FullSync, Policy

#: Without a word from another process for so long, it counts as lost.
DEFAULT_PATIENCE_S = 60.0


class DataParallel(nn.Module):
    """Trains a module in several processes of a torch.distributed process group."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        policy: Policy | None = None,
        *,
        process_group: Any = None,
        clip_norm: float | None = None,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        patience_s: float = DEFAULT_PATIENCE_S,
    ) -> None:
        super().__init__()
        check_there_is_a_group()
        self.policy = FullSync() if policy is None else policy
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        if not named:
            raise BadInput("the module has no parameter that needs a gradient; there is nothing to train")
        buffers = buffers_of(module)
        self.module = module
        self.processes = Processes(process_group, named[0][1].device, patience_s)
        check_same_model(self.processes, [*named, *buffers], optimizer, repr(self.policy))
        for tensor in module.state_dict().values():
            if isinstance(tensor, Tensor):
                self.processes.broadcast(tensor.detach())
        layout = Layout([one for _, one in named], [one for _, one in buffers], self.workers, bucket_bytes)
        self._overlap = overlap
        self._steps = PartialSteps(optimizer)
        self._plane = FreeRunning(
            layout,
            self.processes,
            self.worker,
            self._steps,
            delay=getattr(self.policy, "delay", 0),
            clip_norm=clip_norm,
            sits_out=lambda number: False,
            send=lambda message: None,
        )
        self._guard = Guard(module, self._plane.gate)
        self._hooks = GradientHooks(self._plane)
        self._takeover = Takeover(optimizer, self._step, self.synchronize)
        self.version = 0
        self.receipt: Receipt | None = None
        self._plane.start()

    @property
    def worker(self) -> int:
        return self.processes.worker

    @property
    def workers(self) -> int:
        return self.processes.workers

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            self._before_compiled()
        else:
            self._before_forward()
        return self.module(*inputs, **named)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_compiled(self) -> None:
        self._before_forward()
        self.synchronize()

    def _before_forward(self) -> None:
        if torch.is_grad_enabled():
            self._plane.begin_iteration()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._hooks.syncing = self._hooks.syncing, False
        try:
            yield
        finally:
            self._hooks.syncing = before

    def _step(self) -> Receipt:
        round = self._plane.step(self._steps.hyper())
        if self._plane.delay:
            self._hooks.forget()
        if round is None:
            self.receipt = Receipt(False, self.version, "there was no gradient")
        else:
            self.version += 1
            self.receipt = Receipt(True, self.version, "all are in", staleness=self._plane.delay)
        if not self._overlap:
            self.synchronize()
        return self.receipt

    def synchronize(self) -> None:
        self._plane.synchronize()

    def check_identical(self) -> str:
        self.synchronize()
        return check_same_values(self.processes, self.module.state_dict().items(), self.version)

    def finish(self) -> None:
        self._plane.finish()
        self._takeover.give_back()
        self._hooks.remove()
        self._guard.remove()
