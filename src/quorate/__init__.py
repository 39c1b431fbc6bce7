"""Quorate: distributed PyTorch training on slow, uneven or dying workers.

The core imports with torch and the standard library alone. The public names (`quorate._public`) are imported when
the first of them is used, so that `quorate --help` need not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quorate._public import *  # noqa: F403
    from quorate._public import __version__ as __version__


def __getattr__(name: str) -> Any:
    if name in ("__version__", "__all__") or not name.startswith("_"):  # what is private is a module or nothing
        public = import_module("quorate._public")
        globals().update({one: getattr(public, one) for one in public.__all__}, __all__=public.__all__)
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module 'quorate' has no attribute {name!r}")
