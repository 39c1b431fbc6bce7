"""Reading a parameter waits for its update, and for nothing else.

Updates are applied while the script goes on, so whatever reads a parameter must wait for that parameter's update. The
reads are the dependencies: modules keep their parameters and buffers in dictionaries, and ours wait when something is
taken out. So a layer that uses another layer's weight is safe too, as are `state_dict()`, `parameters()` and
`module.weight`. Modules that keep references elsewhere (recurrent ones, compiled ones) wait before their forward, and
what is inside a compiled module is waited for when the step is made.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, ValuesView
from typing import Any

import torch
from torch import Tensor, nn

from quorate.errors import BadInput


class Gate:
    """Which tensors must not be read yet. `closed` is looked at on every read, so it is a plain attribute."""

    def __init__(self, wait: Callable[[Iterable[int]], None]) -> None:
        self.closed = False
        self._wait = wait
        self._bucket_of: dict[int, int] = {}

    def know(self, tensor: Tensor, bucket: int) -> None:
        self._bucket_of[id(tensor)] = bucket

    def pass_all(self, tensors: Iterable[Any]) -> None:
        """Wait until all of these may be read."""
        if torch.compiler.is_compiling():
            return  # a compiled module waited before it was called
        numbers = {self._bucket_of[id(tensor)] for tensor in tensors if id(tensor) in self._bucket_of}
        if numbers:
            self._wait(numbers)

    def pass_one(self, tensor: Any) -> None:
        number = self._bucket_of.get(id(tensor))
        if number is not None:
            self._wait((number,))


class GuardedTensors(dict[str, Any]):
    """A module's own parameters or buffers, which wait when they are read."""

    gate: Gate

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if self.gate.closed:
            self.gate.pass_one(value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - that would be this very function

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        if self.gate.closed:
            self.gate.pass_all(dict.values(self))
        return dict.items(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        if self.gate.closed:
            self.gate.pass_all(dict.values(self))
        return dict.values(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)  # a copy of the module has nothing to wait for

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        from copy import deepcopy

        return {name: deepcopy(value, memo) for name, value in self.items()}

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


class Guard:
    """Puts a module's tensors behind a gate, and takes them out again."""

    def __init__(self, module: nn.Module, gate: Gate) -> None:
        self._module = module
        self._gate = gate
        self._handles: list[Any] = []
        self._unguarded: list[Tensor] = []
        for one, inside_compiled in _with_compiled(module, False):
            if _keeps_references(one) or _is_compiled(one):
                self._handles.append(one.register_forward_pre_hook(_waiting(one, gate)))
            if inside_compiled or isinstance(one, torch.jit.ScriptModule):
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
        """Wait for tensors whose readers cannot be seen: those of compiled modules, which want plain dictionaries."""
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


def _keeps_references(module: nn.Module) -> bool:
    return isinstance(module, (nn.RNNBase, torch.jit.ScriptModule))


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _with_compiled(module: nn.Module, inside: bool) -> Iterable[tuple[nn.Module, bool]]:
    """Every module once, and whether it is part of a compiled one."""
    seen: set[int] = set()
    stack = [(module, inside)]
    while stack:
        one, within = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        within = within or _is_compiled(one)
        yield one, within
        stack += [(child, within) for child in one.children()]
