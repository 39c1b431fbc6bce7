"""Options that commands share, in groups.

A group is a dataclass with one field per option. `grouped` lets a command take groups as arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import typer

from quorate.errors import BadInput


def grouped(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Decorator: every field of an argument that is a dataclass becomes an option of the command."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, type[Any]] = {
        name: kind for name, kind in hints.items() if isinstance(kind, type) and is_dataclass(kind)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group = groups[parameter.name]
        types = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
            )
            for field in fields(group)
        ]

    @wraps(function)
    def command(**given: Any) -> int | None:
        arguments = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return function(**arguments, **given)

    del command.__dict__["__wrapped__"]  # typer would read the signature of the wrapped function
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


DEFAULT_LATENCY = "pause:0.05,0.05,10"
#: Repeated here, because quorate.task imports torch.
READY_TASKS = "digits, mnist, cifar10, cifar10-inception, pixelcnn, charlm, cartpole"

SUBJECT, CLUSTER, POLICY = "What is trained", "The cluster", "The policy"
END, UPDATE = "When it ends", "The update"
KEPT, OUTPUT = "What is kept", "Arithmetic and output"


def option(panel: str, text: str, *flags: str, **rest: Any) -> Any:
    """An option with its help text, in one of the panels of `--help`."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **rest)


# ---------------------------------------------------------------- the task


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The task and its seed."""

    task: Annotated[
        str, option(SUBJECT, f"{READY_TASKS}; or your own: file.py:Class, package.module:Class.", metavar="TASK")
    ] = "digits"
    batch_size: Annotated[
        int | None, option(SUBJECT, "Samples in a worker's batch.", show_default="the task's", metavar="SAMPLES")
    ] = None
    seed: Annotated[
        int, option(SUBJECT, "Draws parameters, order of samples and delays; equal seeds, equal simulated runs.")
    ] = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise BadInput(f"seed is {self.seed}, but it must be at least 0 and below 2^63")


@dataclass(frozen=True, kw_only=True)
class SubjectOptions(TaskOptions):
    """The task, or only its sizes for a run without gradients."""

    no_gradients: Annotated[
        bool, option(SUBJECT, "Compute times, staleness, drops and bytes only.", "--no-gradients")
    ] = False
    model_bytes: Annotated[
        int | None,
        option(SUBJECT, "Size of the parameters, for --no-gradients.", show_default="the task's", metavar="BYTES"),
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
    "e.g. constant:0.05, shifted-exp:0.05,0.025, pareto:0.05,1.5, chen2016, trace:RUN or trace:TIMES.csv; "
    "modifiers follow after *, e.g. lognormal:0.05,0.4*slow:3=4; changes in time: MODEL->SECONDS->MODEL."
)

ThreadsOption = Annotated[
    int, option(CLUSTER, "Threads of torch in each worker; small models gain nothing from more than one.", min=1)
]
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
        f"Communication, e.g. bandwidth=1Gbps,latency=0.5ms,server=10Gbps; shards=8: 8 servers.{which}",
        show_default="free",
        metavar="LINKS",
    )


def faults_option(text: str) -> Any:
    return option(CLUSTER, text, show_default="none", metavar="SCRIPT")


def patience_option(text: str) -> Any:
    return option(CLUSTER, text, metavar="SECONDS")


def together_option(which: str = "") -> Any:
    return option(
        UPDATE,
        f"Compute a round as one big batch, and asynchronous gradients side by side, or worker by worker.{which}",
        "--together/--apart",
        show_default="together on a GPU",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The number of simulated workers and their behaviour."""

    workers: WorkersOption = "8"
    latency: Annotated[str, option(CLUSTER, f"How long a ticket takes, {_MODELS}", metavar="MODEL")] = DEFAULT_LATENCY
    network: Annotated[str | None, network_option()] = None
    faults: Annotated[
        str | None, faults_option("Workers that go and come, e.g. 'lose:3@10;join:3@25;crash:100,5'.")
    ] = None
    patience: Annotated[float, patience_option("Virtual seconds to wait for workers when too few are alive.")] = 600


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """The number of real workers, where they run, and artificial delays and faults."""

    engine: Annotated[
        str, option(CLUSTER, "Where workers are: processes of this machine, or on Ray.", metavar="local|ray")
    ] = "local"
    workers: Annotated[str | None, option(CLUSTER, _N_PLUS_B, show_default="one a core", metavar="N+b")] = None
    threads: ThreadsOption = 1
    device: Annotated[
        str | None,
        option(
            CLUSTER,
            "Where workers compute: cpu, cuda (all GPUs in turn) or one such as cuda:1 (local).",
            show_default="cpu; cuda with --gpus",
            metavar="DEVICE",
        ),
    ] = None
    wire: Annotated[str | None, wire_option()] = None
    latency: Annotated[
        str | None,
        option(CLUSTER, f"An artificial delay before each ticket, {_MODELS}", show_default="none", metavar="MODEL"),
    ] = None
    faults: Annotated[
        str | None,
        faults_option("Workers to kill, e.g. 'lose:3@2' (worker 3 after 2 s); they come back by themselves."),
    ] = None
    patience: Annotated[
        float, patience_option("Seconds to wait when too few workers are alive, or for one that does not answer.")
    ] = 600


# ---------------------------------------------------------------- the policy

PolicyOption = Annotated[
    str | None,
    option(
        POLICY,
        "backup, full-sync, async, softsync, bounded, k-batch, delayed, deadline or adaptive; "
        "or one of your own, file.py:Class or package.module:Class.",
        show_default="backup for N+b, else full-sync",
        metavar="NAME",
    ),
]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Options of single policies; a field has the name of the policy's argument."""

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
    gradients: Annotated[
        int | None, option(POLICY, "Arrivals that make an update. (softsync)", show_default="the N of N+b")
    ] = None
    bound: Annotated[
        int | None, option(POLICY, "Steps a worker may be ahead of the slowest. (bounded)", show_default="3")
    ] = None
    k: Annotated[
        int | None, option(POLICY, "Gradients that make an update. (k-batch)", show_default="the N of N+b")
    ] = None
    delay: Annotated[int | None, option(POLICY, "Versions an update lags behind. (delayed)", show_default="1")] = None
    warm_up: Annotated[
        int | None, option(POLICY, "Updates over which the delay grows to that. (delayed)", show_default="0")
    ] = None
    limit: Annotated[
        float | None, option(POLICY, "Seconds a round lasts. (deadline)", show_default="learned", metavar="SECONDS")
    ] = None
    minimum: Annotated[
        int | None, option(POLICY, "Arrivals a round waits for even so. (deadline)", show_default="half")
    ] = None
    slack: Annotated[
        float | None,
        option(
            POLICY,
            "Learned limit as a multiple of the median arrival time. (deadline)",
            show_default="1.5",
            metavar="X",
        ),
    ] = None

    noise_scale: Annotated[
        float | None,
        option(POLICY, "Gradient noise scale in samples. (adaptive)", show_default="learned", metavar="SAMPLES"),
    ] = None
    least: Annotated[int | None, option(POLICY, "The smallest quorum to choose. (adaptive)", show_default="1")] = None
    explore: Annotated[
        float | None,
        option(
            POLICY,
            "Share of progress that looking beyond the quorum may cost. (adaptive)",
            show_default="0.02",
            metavar="SHARE",
        ),
    ] = None

    policy_option: Annotated[
        list[str] | None,
        option(POLICY, "An argument of a policy of your own, e.g. share=0.5; may be repeated.", metavar="NAME=VALUE"),
    ] = None

    def given(self) -> dict[str, Any]:
        """The options of built-in policies that the user gave."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "policy_option"}
        return {name: value for name, value in found.items() if value is not None and value is not False}


# ---------------------------------------------------------------- the end and the update


@dataclass(frozen=True, kw_only=True)
class EndOptions:
    """The end of a run: the first condition that holds."""

    updates: Annotated[
        int | None, option(END, "End after this many updates.", show_default="1000 for a stream or without gradients")
    ] = None
    epochs: Annotated[int | None, option(END, "End after this many epochs.", show_default="20")] = None
    until: Annotated[
        str | None, option(END, "End when this holds, e.g. 'accuracy>=0.95' or 'seconds>=60'.", metavar="CONDITION")
    ] = None
    default_epochs: ClassVar[int] = 20


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """How gradients become an update, and how often the model is evaluated."""

    clip_norm: Annotated[
        float | None, option(UPDATE, "Clip the averaged gradient to this global norm.", metavar="NORM")
    ] = None
    ema: Annotated[
        float | None,
        option(UPDATE, "Decay of a moving average of the parameters; it is what is evaluated.", metavar="DECAY"),
    ] = None
    delay_compensation: Annotated[
        float | None, option(UPDATE, "λ of DC-ASGD for stale gradients.", metavar="LAMBDA")
    ] = None
    evaluate_every: Annotated[
        int | None, option(UPDATE, "Updates between evaluations.", show_default="some 100 in a run")
    ] = None

    def given(self) -> list[str]:
        """The names of the options that the user gave."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


@dataclass(frozen=True, kw_only=True)
class UpdateOptions(LearningOptions):
    """Learning options, and where a simulation computes. All of them need gradients."""

    device: Annotated[
        str | None,
        option(UPDATE, "Where gradients are computed: cpu, cuda, cuda:1.", show_default="cpu", metavar="DEVICE"),
    ] = None
    together: Annotated[bool | None, together_option()] = None


# ---------------------------------------------------------------- output


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is printed."""

    json: Annotated[bool, option(OUTPUT, "Print one JSON object on stdout, nothing else.", "--json")] = False
    quiet: Annotated[bool, option(OUTPUT, "No progress on stderr.", "--quiet", "-q")] = False


OutFolderOption = Annotated[
    Path | None, option(OUTPUT, "A new folder for what is recorded.", show_default="nothing is saved", metavar="FOLDER")
]
FigureOption = Annotated[Path | None, option(OUTPUT, "Draw the comparison into this file.", metavar="FILE.png")]
