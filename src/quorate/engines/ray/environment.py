"""What the nodes need beside quorate: the task's files and packages, as Ray's runtime_env."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quorate.errors import BadInput


def checked_environment(runtime_env: dict[str, Any] | None, working_dir: str | None) -> dict[str, Any]:
    """Ray's runtime_env with the working folder in it; BadInput for what Ray would only find later."""
    if runtime_env is not None and not isinstance(runtime_env, dict):
        raise BadInput(f"runtime_env is a {type(runtime_env).__name__}, but it must be a dict as Ray takes it")
    environment = dict(runtime_env or {})
    if working_dir is not None:
        if environment.get("working_dir") not in (None, working_dir):
            raise BadInput("both working_dir and runtime_env['working_dir'] are given; give one of them")
        environment["working_dir"] = working_dir
    folder = environment.get("working_dir")
    if folder is not None:
        _check_folder(str(folder))
    from ray.runtime_env import RuntimeEnv

    try:
        RuntimeEnv(**environment)
    except (TypeError, ValueError) as error:
        raise BadInput(f"runtime_env is not one that Ray takes: {error}") from error
    return environment


def _check_folder(folder: str) -> None:
    if "://" in folder:  # an archive in a store that every node reaches
        return
    path = Path(folder)
    if path.suffix == ".zip" and path.is_file():
        return
    if not path.exists():
        raise BadInput(f"working_dir is {folder!r}, but there is no such folder; give the one with the task's files")
    if not path.is_dir():
        raise BadInput(f"working_dir is {folder!r}, which is a file; give the folder that holds it")
