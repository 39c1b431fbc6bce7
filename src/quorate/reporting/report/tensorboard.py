"""TensorBoard export of the curves of a report: one folder per run."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quorate.errors import BadInput, install_line
from quorate.reporting.figures import MissingLibrary
from quorate.reporting.report.tables import slug

_OURS = ".quorate"  # suffix of exported files; only files with it are replaced


def check_can_export() -> None:
    if find_spec("tensorboard") is None:
        raise MissingLibrary(
            f"--tensorboard needs tensorboard, which is not installed; type: {install_line('tensorboard')}"
        )


def write_events(data: dict[str, Any], folder: Path) -> list[str]:
    """Write loss, measures and chosen quorums by version, with the run's seconds as wall time; returns the folders."""
    check_can_export()
    names: list[str] = []
    for run in data["runs"]:
        name = slug(run["label"])
        while name in names:
            name += "-again"
        names.append(name)
        try:
            _write(run, folder / name)
        except OSError as error:
            raise BadInput(f"the folder {str(folder)!r} cannot be written: {error.strerror}; name another") from error
    return names


def _write(run: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports emit warnings
        from torch.utils.tensorboard.writer import SummaryWriter
    for old in folder.glob(f"events.out.tfevents.*{_OURS}"):
        old.unlink()
    curves = {f"measures/{name}": curve for name, curve in run["measures"].items()}
    if run["loss"] is not None:
        curves["loss"] = run["loss"]
    with SummaryWriter(str(folder), filename_suffix=_OURS) as writer:
        for tag, curve in curves.items():
            for time, version, value in zip(curve["time"], curve["updates"], curve["value"], strict=True):
                if value is not None:
                    writer.add_scalar(tag, value, version, walltime=time)
        if run["choices"]:
            for change in run["choices"]["changes"]:
                writer.add_scalar("quorum", change["quorum"], change["version"], walltime=change["time"])
