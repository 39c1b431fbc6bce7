"""Turns gradients into the next version: parameters, optimizer, schedule, clipping and moving average (EMA)."""

from __future__ import annotations

import ctypes
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quorate.errors import BadInput
from quorate.flat import ALIGNMENT_BYTES, Flat
from quorate.task import BoundTask


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Options for an update, in addition to the task's optimizer and schedule.

    clip_norm: scale the averaged gradient down to this global norm.
    ema: keep a moving average of the parameters with this decay; evaluation then uses the average.
    delay_compensation: λ of DC-ASGD (Zheng et al., 2017): g + λ·g⊙g⊙(w − w_read) for stale gradients.
    """

    clip_norm: float | None = None
    ema: float | None = None
    delay_compensation: float | None = None

    def __post_init__(self) -> None:
        if self.clip_norm is not None and not (self.clip_norm > 0 and math.isfinite(self.clip_norm)):
            raise BadInput(f"clip_norm is {self.clip_norm}, but a norm to clip to must be more than 0")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise BadInput(f"ema is {self.ema}, but a decay lies between 0 and 1 (the paper has 0.9999)")
        if self.delay_compensation is not None and not (
            self.delay_compensation >= 0 and math.isfinite(self.delay_compensation)
        ):
            raise BadInput(f"delay_compensation is {self.delay_compensation}, but λ must be at least 0")

    def options(self) -> dict[str, float | None]:
        return asdict(self)


class Learner:
    """Owns the newest version. The engine puts gradients into `.grad` of `params`; `step` makes the next version.

    part: the parameters that this learner holds, if the model is sharded; the parameters of other shards are emptied.
    """

    def __init__(
        self, task: BoundTask, learning: Learning, seed: int, device: torch.device, part: slice = slice(None)
    ) -> None:
        self.model = task.model(seed, device)
        self.learning = learning
        self.version = 0
        everything = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.params = everything[part]
        self.optimizer = task.optimizer(everything)
        for parameter in set(everything).difference(self.params):
            self._empty(parameter)
        self.flat = Flat.copy_of(self.params, device)
        self.point_at(self.flat)
        self.schedule = task.schedule(self.optimizer)
        self.average = Flat.copy_of(self.params, device) if learning.ema is not None else None
        self.nbytes = sum(parameter.numel() * parameter.element_size() for parameter in self.params)
        #: Called when gradients are ready, before the optimizer's step.
        self.before_step: Callable[[], None] | None = None

    def _empty(self, parameter: nn.Parameter) -> None:
        """Free a parameter of another shard, also in the optimizer.

        The optimizer is made with all parameters first, because a task may treat them differently by position.
        """
        parameter.data = parameter.data.new_empty(0)
        self.optimizer.state.pop(parameter, None)
        for group in self.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if one is not parameter]

    def point_at(self, flat: Flat) -> None:
        """Make the model compute with the parameters in this buffer."""
        for parameter, view in zip(self.params, flat.views, strict=True):
            parameter.data = view

    # ------------------------------------------------------------ the update

    def step(self, norm: float | None = None, gradients: Sequence[Tensor] | None = None) -> None:
        """Make the next version from the averaged gradient.

        norm: the gradient's global norm, if clipping is on and the caller knows it.
        gradients: tensors that hold the whole gradient (default: the parameters' `.grad`).
        """
        clip = self.learning.clip_norm
        if clip is not None:
            clipped = self.gradients() if gradients is None else list(gradients)
            norm = global_norm(clipped) if norm is None else norm
            if norm > clip:
                torch._foreach_mul_(clipped, clip / norm)
        if self.before_step is not None:
            self.before_step()
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.version += 1
        self._average_in()

    def _average_in(self) -> None:
        if self.average is not None:
            assert self.learning.ema is not None
            average, newest = self.average.views, self.flat.views
            if self.flat.buffer.is_cuda:  # in a few long vectors, since each tensor costs a kernel launch there
                average, newest = (flat.layout.runs(flat.buffer) for flat in (self.average, self.flat))
            torch._foreach_lerp_(average, newest, 1.0 - self.learning.ema)

    def skip(self) -> None:
        """Make a version without an update: only the version number and the schedule advance."""
        self.version += 1
        if self.schedule is not None:
            with warnings.catch_warnings():  # torch warns if the schedule steps without the optimizer
                warnings.simplefilter("ignore")
                self.schedule.step()

    def plain_sgd_rate(self) -> float | None:
        """The learning rate if a step is exactly parameters − rate·gradient, else None.

        A caller that has the gradient in pieces may then step the parameters itself, and call `stepped`.
        """
        optimizer = self.optimizer
        if type(optimizer) is not torch.optim.SGD or self.learning.clip_norm is not None:
            return None
        group = optimizer.param_groups[0]
        more = any(group[name] for name in ("momentum", "weight_decay", "maximize", "differentiable"))
        hooked = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        replaced = "step" in vars(optimizer) and not getattr(optimizer.step, "_wrapped_by_lr_sched", False)
        whole = len(optimizer.param_groups) == 1 and len(group["params"]) == len(self.params)
        if more or hooked or replaced or not whole or not isinstance(group["lr"], float | int):
            return None
        return float(group["lr"])

    def stepped(self) -> None:
        """Do the rest of a step after the caller has updated the parameters itself."""
        self.skip()
        self._average_in()

    def norm_for_clipping(self) -> float | None:
        """The global norm of the gradient in `.grad`; None if clipping is off and nothing needs it."""
        return None if self.learning.clip_norm is None else global_norm(self.gradients())

    def gradients(self) -> list[Tensor]:
        """The gradients that exist; a parameter that the loss does not depend on has none."""
        return [parameter.grad for parameter in self.params if parameter.grad is not None]

    def clear_gradients(self) -> None:
        for parameter in self.params:
            parameter.grad = None

    # ------------------------------------------------------------ reading

    @contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """The model to evaluate: with the averaged parameters, if an average is kept."""
        if self.average is None:
            yield self.model
            return
        self.point_at(self.average)
        try:
            yield self.model
        finally:
            self.point_at(self.flat)

    def state_dict(self) -> dict[str, Tensor]:
        """A copy of the newest parameters and buffers, by name."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def average_dict(self) -> dict[str, Tensor] | None:
        """A copy of the averaged parameters and the buffers, by name; None if no average is kept."""
        if self.average is None:
            return None
        with self.evaluation():
            return self.state_dict()

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Copies of the state that a resumed run needs."""
        return {
            "version": self.version,
            "model": self.state_dict(),
            "optimizer": _copied(self.optimizer.state_dict()),
            "schedule": None if self.schedule is None else _copied(self.schedule.state_dict()),
            "average": None if self.average is None else self.average.buffer.clone(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state` gave."""
        self.version = state["version"]
        self.model.load_state_dict(state["model"])  # copies into the flat buffer, in place
        self.optimizer.load_state_dict(_copied(state["optimizer"]))
        if self.schedule is not None:
            self.schedule.load_state_dict(_copied(state["schedule"]))
        if self.average is not None:
            self.average.buffer.copy_(state["average"])


def global_norm(tensors: Sequence[Tensor]) -> float:
    """The 2-norm of all tensors together; finite if and only if every element is."""
    if not tensors:
        return 0.0
    if tensors[0].device.type == "cpu" and all(tensor.dtype == torch.float32 for tensor in tensors):
        norm = _root(sum(map(_dot, tensors)))
    else:
        norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors)))))
    if math.isfinite(norm):
        return norm
    # A square may have overflowed. In double precision, squares of smaller types cannot overflow.
    return _root(sum(map(_square, tensors)))


def _dot(tensor: Tensor) -> float:
    flat = tensor.reshape(-1)
    return float(torch.dot(flat, flat))  # BLAS, twice as fast as torch's norm


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _root(total: float) -> float:
    return math.sqrt(total) if total >= 0 else math.nan


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if it is not aligned: BLAS may round differently by alignment."""
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()


def squares(tensors: Sequence[Tensor]) -> list[float]:
    """The square of each tensor's 2-norm. `norm_of_squares` combines the squares of several shards."""
    found = [_dot(_aligned(one)) if one.dtype == torch.float32 else math.inf for one in tensors]
    return [value if math.isfinite(value) else _square(one) for value, one in zip(found, tensors, strict=True)]


def norm_of_squares(found: Sequence[float]) -> float:
    """The norm of all tensors together; for 32-bit tensors it is bitwise equal to `global_norm`."""
    return _root(sum(found))


def squared_norm(tensors: Sequence[Tensor]) -> float:
    """The squared 2-norm, bitwise equal wherever in memory the tensors are."""
    norm = global_norm([_aligned(one) for one in tensors])
    return norm * norm


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no element is NaN or Inf. A finite sum proves it, at half the cost of a norm."""
    if tensors and tensors[0].is_cuda:  # one synchronization with the device, not one a tensor
        total = float(torch.stack(torch._foreach_norm(list(tensors))).sum())
    else:
        total = 0.0
        for tensor in tensors:
            total += tensor.sum().item()
    return math.isfinite(total) or all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def digest(tensors: dict[str, Tensor]) -> str:
    """A fingerprint of parameters: equal if and only if names, types, shapes and all bits are equal."""
    sha = hashlib.sha256()
    for name, tensor in tensors.items():
        data = tensor.detach().cpu().contiguous()
        sha.update(f"{name}|{data.dtype}|{tuple(data.shape)}|".encode())
        # Read from memory: torch gives bytes only through numpy, which may not be installed.
        sha.update((ctypes.c_char * (data.numel() * data.element_size())).from_address(data.data_ptr()))
    return sha.hexdigest()


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value
