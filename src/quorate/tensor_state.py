"""The state of a run without pickle: JSON values that refer to tensors by name, and the tensors in safetensors."""

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

#: The types that every release of safetensors can hold. Tensors of any other type are stored as bytes.
_STORED_AS_THEY_ARE = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}
#: Levels of nesting: far more than any real state has, and far fewer than Python's stack can hold.
_DEEPEST = 100


def pack(state: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """The state as JSON values that refer to tensors by name, and those tensors, not copied.

    Types must match exactly: a subclass (a named tuple, a numpy number, an OrderedDict) would come back as
    another type, and the resumed run might then differ.
    """
    if type(state) is not dict:
        raise BadInput(f"the state to save is a {type(state).__name__}, but it must be a dict")
    tensors: dict[str, Tensor] = {}
    return _packed(state, "", 0, tensors), tensors


def check_can_save(state: dict[str, Any]) -> None:
    """Refuse a state that no checkpoint can hold; the message names the value."""
    pack(state)


def _packed(value: Any, path: str, depth: int, tensors: dict[str, Tensor]) -> Any:
    if depth > _DEEPEST:
        raise BadInput(f"{path[:60]}… is nested deeper than {_DEEPEST} levels; it cannot be saved in a checkpoint")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:  # Python refuses to parse decimal numbers of very many digits
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
    # The number distinguishes paths that read alike; the path is for people who open the file.
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
    """The inverse of `pack`. A value that `pack` cannot have written raises an exception, and nothing worse."""
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
    """Import safetensors, and numpy, which it needs to write; BadInput with the install line if one is missing."""
    try:
        importlib.import_module("numpy")
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as fault:
        name = (fault.name or "safetensors").split(".")[0]
        raise BadInput(f"checkpoints need {name}, which is not installed; type: pip install {name}") from None


def store(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a file with `save_file`, which lets other threads run; `save` stops them for seconds."""
    find_safetensors()
    save_file(_storable(tensors), file)


def save_file(tensors: dict[str, Tensor], file: Path) -> None:
    """`safetensors.torch.save_file`, but with the usual mode of new files (not 0600) and OSError for disk errors."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file as save

    file.touch()
    mode = file.stat().st_mode
    try:
        save(tensors, file)
    except SafetensorError as fault:
        number = re.search(r"\(os error (\d+)\)", str(fault))
        if number is None:
            raise OSError(errno.EIO, str(fault)) from fault
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from fault
    file.chmod(mode)


def tensors_in(content: bytes) -> dict[str, Tensor]:
    """The inverse of `store`, from the bytes of the file."""
    tensors: dict[str, Tensor] = find_safetensors().torch.load(content)
    return tensors


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors needs them: in main memory, contiguous, and no two with shared storage."""
    ready: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        # Conjugation and negation may be mere flags on a tensor, which safetensors would ignore.
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if plain.dtype not in _STORED_AS_THEY_ARE:
            # A row of bytes. `reshape` would keep the odd stride that a tensor of 0 or 1 elements may have.
            plain = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        storage = plain.untyped_storage().data_ptr()
        ready[name] = plain.clone() if storage in storages else plain
        storages.add(storage)
    return ready


def check_same_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], owner: str) -> None:
    """Refuse tensors of a checkpoint that do not fit the expected ones; the message names the first difference.

    owner: the object that the tensors belong to, such as "model".
    """
    another = f"the checkpoint is of another {owner}"
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
