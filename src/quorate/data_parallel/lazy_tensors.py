"""Parameters and gradients that wait when they are read: for their update, or for their average.

After backward, `parameter.grad` is a `PendingGradient`. Clipping, unscaling and logging work as usual, and a script
that does none of them never waits between backward and the next forward.

Updates are applied while the script goes on, so each read of a parameter must wait for that parameter's update. Modules
keep their parameters and buffers in dictionaries. `Guard` replaces these by dictionaries that wait on every lookup.
This covers layers that use another layer's weight, `state_dict()`, `parameters()` and `module.weight`. Modules that
keep references elsewhere (recurrent and compiled modules) wait before their forward. Parameters inside a compiled
module are waited for in `step()`.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, ValuesView
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quorate.errors import BadInput


class PendingGradient(Tensor):
    """Looks like the averaged gradient; any operation on it waits for the average and then uses the average."""

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
        """Wait for the average and return it."""
        return self._settle()

    # torch does not send the following methods of a subclass through __torch_dispatch__.

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
    """A gradient as an ordinary tensor; waits for the average if it is pending."""
    return gradient.settled() if isinstance(gradient, PendingGradient) else gradient


class Gate:
    """Blocks reads of tensors whose update is not applied yet.

    `closed` is checked on every read, so it is a plain attribute.
    """

    def __init__(self, wait: Callable[[Iterable[int]], None]) -> None:
        self.closed = False
        self.wait = wait
        self._bucket_of: dict[int, int] = {}

    def know(self, tensor: Tensor, bucket: int) -> None:
        self._bucket_of[id(tensor)] = bucket

    def pass_all(self, tensors: Iterable[Any]) -> None:
        """Wait until all of these tensors may be read."""
        if torch.compiler.is_compiling():
            return  # A compiled module waited before it was called.
        numbers = {self._bucket_of[id(tensor)] for tensor in tensors if id(tensor) in self._bucket_of}
        if numbers:
            self.wait(numbers)

    def pass_one(self, tensor: Any) -> None:
        number = self._bucket_of.get(id(tensor))
        if number is not None:
            self.wait((number,))


class GuardedTensors(dict[str, Any]):
    """A module's own parameters or buffers, which wait when they are read."""

    gate: Gate

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if self.gate.closed:
            self.gate.pass_one(value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - self.get would call itself

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        if self.gate.closed:
            self.gate.pass_all(dict.values(self))
        return dict.items(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        if self.gate.closed:
            self.gate.pass_all(dict.values(self))
        return dict.values(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)  # A copy of the module gets no updates, so it need not wait.

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return {name: deepcopy(value, memo) for name, value in self.items()}

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


class Guard:
    """Replaces a module's dictionaries of tensors by guarded ones; `remove` restores them."""

    def __init__(self, module: nn.Module, gate: Gate) -> None:
        self._module = module
        self._gate = gate
        self._handles: list[Any] = []
        self._unguarded: list[Tensor] = []
        inside_compiled = {id(inner) for one in module.modules() if _is_compiled(one) for inner in one.modules()}
        for one in module.modules():
            if isinstance(one, (nn.RNNBase, torch.jit.ScriptModule)) or _is_compiled(one):
                self._handles.append(one.register_forward_pre_hook(_waiting(one, gate)))
            if id(one) in inside_compiled or isinstance(one, torch.jit.ScriptModule):
                self._unguarded += [*one.parameters(recurse=False), *one.buffers(recurse=False)]
                continue
            for kind in ("_parameters", "_buffers"):
                known = one.__dict__.get(kind)
                if isinstance(known, GuardedTensors):
                    raise BadInput("this module is in a DataParallel already; finish() that one first")
                if type(known) is dict and known:
                    guarded = GuardedTensors(known)
                    guarded.gate = gate
                    one.__dict__[kind] = guarded

    def settle(self) -> None:
        """Wait for the tensors of compiled modules: these need plain dictionaries, so their reads are not seen."""
        if self._unguarded and self._gate.closed:
            self._gate.pass_all(self._unguarded)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for one in self._module.modules():
            for kind in ("_parameters", "_buffers"):
                known = one.__dict__.get(kind)
                if isinstance(known, GuardedTensors):
                    one.__dict__[kind] = dict(dict.items(known))


def _waiting(module: nn.Module, gate: Gate) -> Callable[..., None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(*_: Any) -> None:
        if gate.closed:
            gate.pass_all([*module.parameters(), *module.buffers()])

    return wait  # type: ignore[no-any-return]


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
