"""The state of a run without pickle: as JSON values, and tensors that are stored by name."""

from __future__ import annotations

import errno
import importlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quorate.errors import BadInput

#: The types that every release of safetensors can hold. Tensors of any other are stored as their bytes.
_STORED_AS_THEY_ARE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
#: Far more than any real state, and far less than what Python's stack holds.
_DEEPEST = 100


def pack(state: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values that name tensors, and those tensors, not copied yet.

    Types must match exactly: a subclass (a named tuple, a numpy number, an OrderedDict) would come back as
    something else than was saved, and the resumed run might then differ.
    """
    if type(state) is not dict:
        raise BadInput(f"the state to save is a {type(state).__name__}, but it must be a dict")
    tensors: dict[str, Tensor] = {}
    return _packed(state, "", 0, tensors), tensors


def check_can_save(state: dict[str, Any]) -> None:
    """Refuse a state that no checkpoint can hold, and say where the trouble is."""
    pack(state)


def _packed(value: Any, path: str, depth: int, tensors: dict[str, Tensor]) -> Any:
    if depth > _DEEPEST:
        raise BadInput(f"{path[:60]}… is nested deeper than {_DEEPEST} levels; it cannot be saved in a checkpoint")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:  # Python refuses to read numbers of very many digits, unless they are hexadecimal
        return value if value.bit_length() < 64 else {"int": hex(value)}
    if kind is float:  # JSON has neither NaN nor infinity
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return [_packed(item, f"{path}[{index}]", depth + 1, tensors) for index, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [_packed(item, f"{path}[{index}]", depth + 1, tensors) for index, item in enumerate(value)]}
    if kind is dict:  # pairs, since JSON keys are text and the order is part of the state
        return {"pairs": [_packed_pair(key, item, path, depth + 1, tensors) for key, item in value.items()]}
    if kind is Tensor:
        return _reference(value, path, tensors)
    raise _cannot_save(path, kind.__name__)


def _packed_pair(key: Any, item: Any, path: str, depth: int, tensors: dict[str, Tensor]) -> list[Any]:
    if type(key) not in (str, int):
        raise BadInput(
            f"{path or 'the state'} has the key {key!r}, a {type(key).__name__}; "
            "it cannot be saved in a checkpoint, where keys are text or whole numbers"
        )
    packed = _packed(key, path, depth, tensors)
    return [packed, _packed(item, f"{path}.{packed}" if path else f"{packed}", depth, tensors)]


def _reference(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout).split(".")[-1]
        raise _cannot_save(path, f"Tensor of the kind {kind}")
    # The number keeps apart paths that read alike; the path is for people who open the file.
    name = f"{len(tensors)} {path}".encode("ascii", "backslashreplace").decode()
    tensors[name] = tensor
    if tensor.dtype in _STORED_AS_THEY_ARE:
        return {"tensor": name}
    return {"tensor": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _cannot_save(path: str, kind: str) -> BadInput:
    return BadInput(
        f"{path} is a {kind}; it cannot be saved in a checkpoint, "
        "which holds dicts, lists, tuples, numbers, text, None and dense tensors"
    )


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `pack`. Whatever `pack` cannot have written raises some exception, and nothing worse."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return _dereferenced(value, tensors)
    ((kind, content),) = value.items()
    if kind == "pairs":
        return {_key(key): unpack(item, tensors) for key, item in content}
    if kind == "tuple":
        return tuple([unpack(item, tensors) for item in content])
    if kind == "int":
        return int(content, 16)
    if kind == "float":
        return float(content)
    raise ValueError(f"{kind!r} is no kind of value")


def _key(packed: Any) -> str | int:
    key = unpack(packed, {})
    if not isinstance(key, str | int):
        raise ValueError(f"{key!r} is no key")
    return key


def _dereferenced(reference: dict[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    stored = tensors[reference["tensor"]]
    if "dtype" not in reference:
        return stored
    dtype: torch.dtype = getattr(torch, reference["dtype"])
    return stored.view(dtype).reshape(reference["shape"])


# ------------------------------------------------------------ tensors


def find_safetensors() -> Any:
    """safetensors, which a bare machine may lack; with numpy, which it needs to write."""
    try:
        importlib.import_module("numpy")
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as fault:
        name = (fault.name or "safetensors").split(".")[0]
        raise BadInput(f"checkpoints need {name}, which is not installed; type: pip install {name}") from None


def store(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a file, by `save_file`: other threads run meanwhile, whereas `save` stops them for seconds."""
    safetensors = find_safetensors()
    try:
        safetensors.torch.save_file(_storable(tensors), file)
    except safetensors.SafetensorError as fault:  # the tensors are fit to be stored, so it was the disk
        number = re.search(r"\(os error (\d+)\)", str(fault))
        if number is None:
            raise OSError(errno.EIO, str(fault)) from fault
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from fault


def tensors_in(content: bytes) -> dict[str, Tensor]:
    """The inverse of `store`, from the bytes of the file."""
    tensors: dict[str, Tensor] = find_safetensors().torch.load(content)
    return tensors


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors wants them: in main memory, in one piece, and no two in the same place."""
    ready: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        # The conjugate and the negative may be mere flags, which safetensors would overlook.
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if plain.dtype not in _STORED_AS_THEY_ARE:
            # A row of bytes. Not by reshape: that keeps the odd stride a tensor of 0 or 1 elements may have.
            plain = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        place = plain.untyped_storage().data_ptr()
        ready[name] = plain.clone() if place in places else plain
        places.add(place)
    return ready


def check_same_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    """Refuse tensors of a checkpoint that do not fit those here; the first that differs is named.

    what: whose tensors they are, such as "model".
    """
    another = f"the checkpoint is of another {what}"
    for name, here in expected.items():
        if name not in found:
            raise BadInput(f"{another}: tensor {name!r} is missing there")
        there = found[name]
        if there.shape != here.shape:
            raise BadInput(f"{another}: tensor {name!r} has shape {tuple(there.shape)} there, {tuple(here.shape)} here")
        if there.dtype != here.dtype:
            raise BadInput(f"{another}: tensor {name!r} has type {there.dtype} there, {here.dtype} here")
    for name in found:
        if name not in expected:
            raise BadInput(f"{another}: tensor {name!r} is there, but not here")
