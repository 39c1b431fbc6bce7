"""Options that commands share, in groups.

A group is a dataclass with one field per option. `grouped` lets a command take groups as arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

import typer

from quorate.errors import BadInput
from quorate.policies import POLICIES
from quorate.policies.base import Flag


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


T = TypeVar("T")

DEFAULT_LATENCY = "pause:0.05,0.05,10"
LOCAL, RAY, SIMULATED = "local", "ray", "simulated"
#: Repeated here, because quorate.task imports torch.
READY_TASKS = "digits, mnist, cifar10, cifar10-inception, pixelcnn, charlm, cartpole"

SUBJECT, CLUSTER, POLICY = "What is trained", "The cluster", "The policy"
END, UPDATE = "When it ends", "The update"
KEPT, OUTPUT = "What is kept", "What is printed"
SEED_HELP = "Draws parameters, order of samples and delays; equal seeds, equal simulated runs."


def option(panel: str, text: str, *flags: str, **rest: Any) -> Any:
    """An option with its help text, in one of the panels of `--help`."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **rest)


# ---------------------------------------------------------------- the task


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The task and its seed; or only its sizes, for a run without gradients."""

    task: Annotated[
        str, option(SUBJECT, f"{READY_TASKS}; or your own: file.py:Class, package.module:Class.", metavar="TASK")
    ] = "digits"
    batch_size: Annotated[
        int | None, option(SUBJECT, "Samples in a worker's batch.", show_default="the task's", metavar="SAMPLES")
    ] = None
    seed: Annotated[int, option(SUBJECT, SEED_HELP)] = 0
    no_gradients: Annotated[
        bool, option(SUBJECT, "Compute times, staleness, drops and bytes only (simulated).", "--no-gradients")
    ] = False
    model_bytes: Annotated[
        int | None,
        option(SUBJECT, "Size of the parameters, for --no-gradients.", show_default="the task's", metavar="BYTES"),
    ] = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise BadInput(f"seed is {self.seed}, but it must be at least 0 and below 2^63")
        if self.model_bytes is not None and not self.no_gradients:
            raise BadInput(
                f"--model-bytes {self.model_bytes} was given, but the task's model has a size of its own; "
                f"leave it out or add --no-gradients"
            )
        if self.model_bytes is not None and self.model_bytes < 0:
            raise BadInput(f"model_bytes is {self.model_bytes}, but a size cannot be negative")


# ---------------------------------------------------------------- the cluster


def workers_option(default: str) -> Any:
    text = "N+b: a quorum of N and b backups, N+b workers in all; or N."
    return option(CLUSTER, text, show_default=default, metavar="N+b")


def latency_option(default: str) -> Any:
    return option(
        CLUSTER,
        "How long a simulated ticket takes, or how long a real one is held back; e.g. constant:0.05, "
        "shifted-exp:0.05,0.025, pareto:0.05,1.5, chen2016, trace:RUN or trace:TIMES.csv; modifiers follow after *, "
        "e.g. lognormal:0.05,0.4*slow:3=4; changes in time: MODEL->SECONDS->MODEL.",
        show_default=default,
        metavar="MODEL",
    )


def threads_option(text: str) -> Any:
    return option(CLUSTER, text, min=1)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Where the workers are."""

    engine: Annotated[
        str,
        option(
            CLUSTER,
            "Where workers are: processes of this machine, on Ray, or simulated in virtual time.",
            metavar="local|ray|simulated",
        ),
    ] = LOCAL
    wire: Annotated[
        str | None,
        option(
            CLUSTER,
            "Format of sent gradients: exact, or bf16 with half the bytes (local, ray).",
            show_default="fp32",
            metavar="fp32|bf16",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The number of workers and their behaviour."""

    workers: Annotated[str | None, workers_option("one a core; 8 simulated")] = None
    threads: Annotated[int, threads_option("Threads of torch in each worker; small models gain nothing from more.")] = 1
    latency: Annotated[str | None, latency_option(f"none; {DEFAULT_LATENCY} simulated")] = None
    network: Annotated[
        str | None,
        option(
            CLUSTER,
            "Communication, e.g. bandwidth=1Gbps,latency=0.5ms,server=10Gbps; shards=8: 8 servers (simulated).",
            show_default="free",
            metavar="LINKS",
        ),
    ] = None
    faults: Annotated[
        str | None,
        option(
            CLUSTER,
            "Workers that go and come, e.g. 'lose:3@10;join:3@25;crash:100,5'; real ones are killed ('lose:3@2': "
            "worker 3 after 2 s), and come back by themselves.",
            show_default="none",
            metavar="SCRIPT",
        ),
    ] = None
    patience: Annotated[
        float,
        option(
            CLUSTER,
            "Seconds to wait when too few workers are alive, or for a real one that does not answer.",
            metavar="SECONDS",
        ),
    ] = 600


# ---------------------------------------------------------------- the policy

PolicyOption = Annotated[
    str | None,
    option(
        POLICY,
        f"{', '.join(POLICIES)}; or one of your own, file.py:Class or package.module:Class.",
        show_default="backup for N+b, else full-sync",
        metavar="NAME",
    ),
]


def _with_flags_of_policies(group: type[T]) -> type[T]:
    """Decorator: add an option for every argument of a policy that has a flag."""
    types: dict[str, Any] = {}
    shown: dict[str, dict[Flag, list[str]]] = {}  # argument -> its flags, which differ in their text -> policies
    for kind in POLICIES.values():
        hints = get_type_hints(kind.__init__)
        for name, argument in inspect.signature(kind).parameters.items():
            if name in kind.flags:
                flag = kind.flags[name]
                flag = flag._replace(default=flag.default or str(argument.default))
                shown.setdefault(name, {}).setdefault(flag, []).append(kind.name)
                types[name] = hints[name]
    added: list[tuple[str, Any, Any]] = []
    for name, flags in shown.items():
        text = " ".join(f"{flag.help} ({', '.join(takers)})" for flag, takers in flags.items())
        if types[name] is bool:
            added.append(
                (name, Annotated[bool, option(POLICY, text, f"--{name.replace('_', '-')}")], field(default=False))
            )
            continue
        default = "; ".join(dict.fromkeys(flag.default or "" for flag in flags))
        shown_as = option(POLICY, text, show_default=default, metavar=next(iter(flags)).metavar)
        added.append((name, Annotated[types[name] | None, shown_as], field(default=None)))
    return make_dataclass(group.__name__, added, bases=(group,), frozen=True, kw_only=True)


@_with_flags_of_policies
@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Options of single policies; a field has the name of the policy's argument."""

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
class UpdateOptions:
    """How gradients become an update, where they are computed, and how often the model is evaluated."""

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
    device: Annotated[
        str | None,
        option(
            UPDATE,
            "Where gradients are computed: cpu, cuda (local workers: all GPUs in turn) or one such as cuda:1.",
            show_default="cpu; cuda with --gpus",
            metavar="DEVICE",
        ),
    ] = None
    together: Annotated[
        bool | None,
        option(
            UPDATE,
            "Compute a round as one big batch, and asynchronous gradients in one call, or worker by worker "
            "(simulated).",
            "--together/--apart",
            show_default="together on a GPU",
        ),
    ] = None

    def given(self) -> list[str]:
        """The names of the options that the user gave."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


# ---------------------------------------------------------------- output


RunArgument = Annotated[Path, typer.Argument(help="The folder of a run, or its trace.jsonl.", metavar="RUN")]
JsonOption = Annotated[bool, option(OUTPUT, "Print one JSON object on stdout, nothing else.", "--json")]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The result and the progress."""

    json: JsonOption = False
    quiet: Annotated[bool, option(OUTPUT, "No progress on stderr.", "--quiet", "-q")] = False


def out_option(default: str) -> Any:
    return option(KEPT, "A new folder for what is recorded.", show_default=default, metavar="FOLDER")
