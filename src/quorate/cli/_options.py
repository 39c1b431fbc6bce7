"""The options that commands share, in groups, each said once.

A command takes groups as arguments; `grouped` (in _grouping.py) makes an option of every field.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from quorate.errors import BadInput

DEFAULT_LATENCY = "pause:0.05,0.05,10"

SUBJECT, CLUSTER, POLICY = "What is trained", "The cluster", "The policy"
END, UPDATE = "When it ends", "The update"
KEPT, OUTPUT = "What is kept", "Arithmetic and output"


def option(panel: str, text: str, *flags: str, **rest: Any) -> Any:
    """An option's help text, in one of the panels of `--help`."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **rest)


# ---------------------------------------------------------------- what is trained


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What is trained."""

    task: Annotated[
        str, option(SUBJECT, "A ready task (digits), file.py:Class or package.module:Class.", metavar="TASK")
    ] = "digits"
    batch_size: Annotated[int | None, option(SUBJECT, "Samples in a worker's batch.", show_default="the task's")] = None
    seed: Annotated[
        int, option(SUBJECT, "Draws parameters, order of samples and delays; equal seeds, equal simulated runs.")
    ] = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise BadInput(f"seed is {self.seed}, but it must be at least 0 and below 2^63")


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(TaskOptions):
    """What is trained, or only timed."""

    no_gradients: Annotated[
        bool, option(SUBJECT, "Compute times, staleness, drops and bytes only.", "--no-gradients")
    ] = False
    model_bytes: Annotated[
        int | None, option(SUBJECT, "Size of the parameters, for --no-gradients.", show_default="the task's")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_bytes is not None and not self.no_gradients:
            raise BadInput(
                f"--model-bytes {self.model_bytes} was given, but the task's model has a size of its own; "
                f"leave it out or add --no-gradients"
            )
        if self.model_bytes is not None and self.model_bytes < 0:
            raise BadInput(f"model_bytes is {self.model_bytes}, but a size cannot be negative")


# ---------------------------------------------------------------- the cluster

_N_PLUS_B = "N+b: a quorum of N and b backups, N+b workers in all; or N."
_MODELS = (
    "e.g. constant:0.05, shifted-exp:0.05,0.025, pareto:0.05,1.5, chen2016, trace:RUN; "
    "modifiers follow after *, e.g. lognormal:0.05,0.4*slow:3=4; changes in time: MODEL->SECONDS->MODEL."
)

WorkersOption = Annotated[str, option(CLUSTER, _N_PLUS_B, metavar="N+b")]


def wire_option(which: str = "") -> Any:
    return option(
        CLUSTER,
        f"Gradients on their way: as they are, or as bf16, half the bytes.{which}",
        show_default="fp32",
        metavar="fp32|bf16",
    )


def network_option(which: str = "") -> Any:
    return option(
        CLUSTER,
        f"Communication, e.g. bandwidth=1Gbps,latency=0.5ms,server=10Gbps; shards=8: so many servers.{which}",
        show_default="free",
        metavar="LINKS",
    )


def together_option(which: str = "") -> Any:
    return option(
        UPDATE,
        f"Compute a round as one big batch, and asynchronous gradients side by side, or worker by worker.{which}",
        "--together/--apart",
        show_default="together on a GPU",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """How many simulated workers there are and how they behave."""

    workers: WorkersOption = "8"
    latency: Annotated[str, option(CLUSTER, f"How long a ticket takes, {_MODELS}", metavar="MODEL")] = DEFAULT_LATENCY
    network: Annotated[str | None, network_option()] = None
    faults: Annotated[
        str | None,
        option(
            CLUSTER,
            "Workers that go and come, e.g. 'lose:3@10;join:3@25;crash:100,5'.",
            show_default="none",
            metavar="SCRIPT",
        ),
    ] = None
    patience: Annotated[float, option(CLUSTER, "Virtual seconds to wait for workers when too few are alive.")] = 600.0


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """How many workers there are, here or on Ray, and what is done to them."""

    engine: Annotated[
        str, option(CLUSTER, "Where workers are: processes of this machine, or on Ray.", metavar="local|ray")
    ] = "local"
    workers: Annotated[str | None, option(CLUSTER, _N_PLUS_B, show_default="one a core", metavar="N+b")] = None
    threads: Annotated[int, option(CLUSTER, "Threads of torch in each worker.", min=1)] = 1
    device: Annotated[
        str | None,
        option(
            CLUSTER,
            "Where workers compute: cpu, cuda (all GPUs in turn) or one such as cuda:1 (local).",
            show_default="cpu; cuda with --gpus",
        ),
    ] = None
    wire: Annotated[str | None, wire_option()] = None
    latency: Annotated[
        str | None,
        option(CLUSTER, f"An artificial delay before each ticket, {_MODELS}", show_default="none", metavar="MODEL"),
    ] = None
    faults: Annotated[
        str | None,
        option(
            CLUSTER,
            "Workers to kill, e.g. 'lose:3@2' (worker 3 after 2 s); they come back by themselves.",
            show_default="none",
            metavar="SCRIPT",
        ),
    ] = None
    patience: Annotated[float, option(CLUSTER, "Seconds to wait for workers when too few are alive.")] = 600.0


# ---------------------------------------------------------------- the policy

PolicyOption = Annotated[
    str | None,
    option(
        POLICY,
        "backup, full-sync, async, softsync, bounded, k-batch, delayed, deadline or adaptive.",
        show_default="backup for N+b, else full-sync",
        metavar="NAME",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What single policies can be told; the names are those of the policies' own arguments."""

    late: Annotated[
        str | None,
        option(
            POLICY,
            "Late work: cancel it, or let it finish and drop it. (backup, k-batch, delayed, deadline, adaptive)",
            show_default="cancel",
            metavar="cancel|finish",
        ),
    ] = None
    max_staleness: Annotated[int | None, option(POLICY, "Drop what is staler than this. (async)")] = None
    staleness_weights: Annotated[
        bool, option(POLICY, "Scale gradients by 1/staleness. (async, softsync, bounded)", "--staleness-weights")
    ] = False
    gradients: Annotated[int | None, option(POLICY, "Arrivals that make an update. (softsync)", show_default="N")] = (
        None
    )
    bound: Annotated[
        int | None, option(POLICY, "Steps a worker may be ahead of the slowest. (bounded)", show_default="3")
    ] = None
    k: Annotated[int | None, option(POLICY, "Gradients that make an update. (k-batch)", show_default="N")] = None
    delay: Annotated[int | None, option(POLICY, "Versions an update lags behind. (delayed)", show_default="1")] = None
    warm_up: Annotated[
        int | None, option(POLICY, "Updates over which the delay grows to that. (delayed)", show_default="0")
    ] = None
    limit: Annotated[float | None, option(POLICY, "Seconds a round lasts. (deadline)", show_default="learned")] = None
    minimum: Annotated[
        int | None, option(POLICY, "Arrivals a round waits for even so. (deadline)", show_default="half")
    ] = None
    slack: Annotated[
        float | None, option(POLICY, "Learned limit, in times half the workers take. (deadline)", show_default="1.5")
    ] = None

    noise_scale: Annotated[
        float | None, option(POLICY, "Gradient noise scale in samples. (adaptive)", show_default="learned")
    ] = None
    least: Annotated[int | None, option(POLICY, "The smallest quorum to choose. (adaptive)", show_default="1")] = None
    explore: Annotated[
        float | None,
        option(POLICY, "Share of progress that looking beyond the quorum may cost. (adaptive)", show_default="0.02"),
    ] = None

    def given(self) -> dict[str, Any]:
        """The options that were given."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value is not None and value is not False}


# ---------------------------------------------------------------- the end and the update


@dataclass(frozen=True, kw_only=True)
class EndOptions:
    """When a run is over: whichever comes first."""

    updates: Annotated[
        int | None,
        option(END, "End after so many updates.", show_default="1000 for a stream or without gradients"),
    ] = None
    epochs: Annotated[int | None, option(END, "End after so many epochs.", show_default="otherwise 5")] = None
    until: Annotated[
        str | None, option(END, "End when this holds, e.g. 'accuracy>=0.95' or 'seconds>=60'.", metavar="CONDITION")
    ] = None
    default_epochs: ClassVar[int] = 5


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """How gradients become an update, and how often it is looked at."""

    clip_norm: Annotated[float | None, option(UPDATE, "Clip the averaged gradient to this global norm.")] = None
    ema: Annotated[
        float | None, option(UPDATE, "Decay of a moving average of the parameters; it is what is evaluated.")
    ] = None
    delay_compensation: Annotated[float | None, option(UPDATE, "λ of DC-ASGD for stale gradients.")] = None
    evaluate_every: Annotated[
        int | None, option(UPDATE, "Updates between evaluations.", show_default="some 100 in a run")
    ] = None

    def given(self) -> list[str]:
        """The names of the options that were given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(LearningOptions):
    """The same, and where a simulation computes; all of it needs gradients."""

    device: Annotated[
        str | None, option(UPDATE, "Where gradients are computed: cpu, cuda, cuda:1.", show_default="cpu")
    ] = None
    together: Annotated[bool | None, together_option()] = None


# ---------------------------------------------------------------- output


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is shown."""

    json: Annotated[bool, option(OUTPUT, "Print one JSON object on stdout, nothing else.", "--json")] = False
    quiet: Annotated[bool, option(OUTPUT, "No progress on stderr.", "--quiet", "-q")] = False


ThreadsOption = Annotated[
    int, option(OUTPUT, "Threads of torch (in each worker); small models gain nothing from more than one.", min=1)
]
OutFolderOption = Annotated[Path | None, option(OUTPUT, "A new folder for what is recorded.", metavar="FOLDER")]
FigureOption = Annotated[Path | None, option(OUTPUT, "Draw the comparison into this file.", metavar="FILE.png")]
