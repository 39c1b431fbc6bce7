"""Gradients whose average is still under way. Whoever reads one waits for it; whoever does not, does not.

After backward, `parameter.grad` is one of these. Clipping, unscaling and logging work as ever, and a script that does
none of them never waits between backward and the next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class PendingGradient(Tensor):
    """Looks like the averaged gradient; any operation on it waits for the average and then works on that."""

    _settle: Callable[[], Tensor]

    @staticmethod
    def __new__(cls, like: Tensor, settle: Callable[[], Tensor]) -> PendingGradient:
        made: PendingGradient = Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made._settle = settle
        return made

    def __init__(self, like: Tensor, settle: Callable[[], Tensor]) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args = tree_map_only(PendingGradient, PendingGradient.settled, args)
        kwargs = tree_map_only(PendingGradient, PendingGradient.settled, kwargs or {})
        return func(*args, **kwargs)

    def settled(self) -> Tensor:
        """The average itself."""
        return self._settle()

    # What torch does not let a subclass do by itself.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.settled())

    def tolist(self) -> Any:
        return self.settled().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.settled().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.settled().__array__(dtype)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        return self.settled().data_ptr()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.settled().detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.settled().detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def plain(gradient: Tensor) -> Tensor:
    """The tensor behind a gradient, averaged if it was to be."""
    return gradient.settled() if isinstance(gradient, PendingGradient) else gradient
