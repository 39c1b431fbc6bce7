"""States of a script's objects: as a checkpoint can hold them, as their owners take them back, and copied."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def plain(value: Any) -> Any:
    """The same with plain dicts: modules have ordered ones, MultiStepLR counts in a Counter."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value.detach() if isinstance(value, nn.Parameter) else value


def like(value: Any, here: Any) -> Any:
    """A loaded value, with the kinds of dict that stand in the same place here."""
    if isinstance(value, dict) and isinstance(here, dict):
        items = {key: like(item, here.get(key)) for key, item in value.items()}
        if type(here) is OrderedDict:  # of a module; it carries the versions of its layers
            made = OrderedDict(items)
            made.__dict__.update(here.__dict__)
            return made
        return Counter(items) if type(here) is Counter else items
    if isinstance(value, list) and isinstance(here, list) and len(value) == len(here):
        return [like(*pair) for pair in zip(value, here, strict=True)]
    return value


class Copies:
    """Copies of tensors in main memory; the memory is used again for the next checkpoint."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._is_on_gpu = False

    def of(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state with all its tensors copied; complete on return."""
        self._is_on_gpu = False
        before, self._kept = self._kept, {}
        copied: dict[str, Any] = self._copied(plain(state), "", before)
        if self._is_on_gpu:
            torch.cuda.synchronize()
        return copied

    def _copied(self, value: Any, path: str, before: dict[str, Tensor]) -> Any:
        if isinstance(value, dict):
            return {key: self._copied(item, f"{path}.{key}", before) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._copied(item, f"{path}.{index}", before) for index, item in enumerate(value))
        if type(value) is not Tensor:
            return value
        if value.layout != torch.strided or value.is_quantized:
            return value.detach().clone()  # refused where it is written, with its place
        kept = before.get(path)
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            kept = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        self._kept[path] = kept.copy_(value.detach(), non_blocking=value.is_cuda)
        self._is_on_gpu |= value.is_cuda
        return kept
