"""Weight gradients of linear layers written straight to where they are wanted.

Autograd makes a new tensor for every gradient. For a big layer that means fresh pages from the system, filled with
zeros, every time: three times the cost of the product itself, before anything is copied into shared memory. Here the
product is written into the worker's block at once, by the very call that autograd would make, so to the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Smaller weights are quicker through autograd's own path and one copy.
WORTH_IT_ELEMENTS = 1 << 17


class DirectLinears:
    """The linear layers of a model that write their weight's gradient themselves, while `target` says where."""

    def __init__(self, model: nn.Module, params: list[nn.Parameter], check: Callable[[], None]) -> None:
        uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
        places = {id(parameter): place for place, parameter in enumerate(params)}
        self._check = check
        self._params = params
        self.places: set[int] = set()
        self.written: set[int] = set()  # places whose gradient is there
        self._uses: Counter[int] = Counter()  # place -> calls of its layer since `begin_forward`
        self._views: list[Tensor] | None = None
        for module in model.modules():
            weight = module._parameters.get("weight")
            if (
                type(module) is nn.Linear
                and "forward" not in vars(module)  # replaced by the user
                and weight is not None
                and weight.numel() >= WORTH_IT_ELEMENTS
                and weight.is_contiguous()
                and id(weight) in places
                and uses[id(weight)] == 1
                and not weight._backward_hooks
                and not getattr(weight, "_post_accumulate_grad_hooks", None)
            ):
                place = places[id(weight)]
                self.places.add(place)
                module.forward = partial(_forward, self, place, module)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: Any) -> DirectLinears:
        return self  # a copy of the model has parameters of its own, which `owns` tells apart

    def owns(self, place: int, weight: Tensor) -> bool:
        """Whether this is the parameter itself, not something that a user computed from it or copied."""
        return weight is self._params[place]

    def begin_forward(self) -> None:
        self._uses.clear()
        self.written.clear()

    def used(self, place: int) -> None:
        """Count a call of a layer. Gradients of several uses are summed by autograd, in its own order."""
        self._uses[place] += 1

    def begin_backward(self, views: list[Tensor]) -> None:
        """The backward pass that follows is the one whose gradients are wanted, here."""
        self._views = views

    def end(self) -> None:
        self._views = None

    def put(self, place: int, grad: Tensor, x: Tensor) -> bool:
        """Write gradᵀ·x for the only use of the weight; False if autograd shall do it."""
        self._check()
        own_call = self._views is None or torch.is_grad_enabled()  # the user calls autograd inside the loss
        if own_call or self._uses[place] > 1:
            return False
        assert self._views is not None
        torch.mm(grad.t(), x, out=self._views[place])
        self.written.add(place)
        return True


def _forward(direct: DirectLinears, place: int, module: nn.Linear, input: Tensor) -> Tensor:
    weight = module.weight
    if torch.is_grad_enabled() and weight.requires_grad and direct.owns(place, weight):
        direct.used(place)
        if _is_plain(input, weight):
            result: Tensor = _Linear.apply(input, weight, module.bias, direct, place)  # type: ignore[no-untyped-call]
            return result
    return functional.linear(input, weight, module.bias)


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether autograd would make the very product that is made here."""
    return (
        x.dim() == 2
        and x.is_contiguous()
        and x.dtype == weight.dtype
        and not weight._backward_hooks
        and not torch.is_autocast_enabled(x.device.type)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)  # inside vmap, grad and the like
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, direct: DirectLinears, place: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.direct, ctx.place = direct, place
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad: Tensor = grads[0]
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        for_weight = None
        if wants_weight and not ctx.direct.put(ctx.place, grad, x):
            for_weight = grad.t().mm(x)
        return grad.mm(weight) if wants_x else None, for_weight, grad.sum(0) if wants_bias else None, None, None
