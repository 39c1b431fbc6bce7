"""The `quorate` application: its commands, their examples, and the layout of `--help`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quorate.cli.compare import compare
from quorate.cli.demo import demo
from quorate.cli.launch import launch
from quorate.cli.plan import plan
from quorate.cli.replay import replay
from quorate.cli.report import report
from quorate.cli.train import simulate, train
from quorate.cli.watch import watch

EXAMPLES = {
    "train": (
        "quorate train --task my_task.py:MyTask --workers 6+2 --epochs 5",
        "quorate train --engine ray --address auto --workers 6+2 --wait 300",
        "quorate train --resume runs/001",
    ),
    "simulate": (
        "quorate simulate --workers 6+2 --latency 'lognormal:0.05,0.4*slow:3=4'",
        "quorate simulate --no-gradients --latency chen2016 --workers 96+4",
    ),
    "compare": (
        "quorate compare --task my_task.py:MyTask --workers 6+2",
        "quorate compare --engine simulated --policies full-sync,backup,k-batch",
    ),
    "plan": ("quorate plan runs/001 --machines 8", "quorate plan --latency chen2016 --machines 100"),
    "replay": ("quorate replay runs/001", "quorate replay runs/001 --task moved/my_task.py:MyTask"),
    "report": ("quorate report runs/001 --open", "quorate report runs/001 runs/002 --target 'accuracy>=0.95'"),
    "watch": ("quorate watch runs/001", "quorate watch runs/001 --terminal"),
    "launch": (
        "quorate launch --workers 4 train.py --epochs 10",
        "quorate launch --workers 4 --restarts 3 --module my_package.train",
    ),
    "demo": ("quorate demo", "quorate demo --out my_demo --overwrite"),
}


def epilog(command: str) -> str:
    """The examples below the help of a command."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {line}" for line in EXAMPLES[command])])


def tidy(command: Any) -> Any:
    """Make the help show values and defaults in the same way with every release of typer; returns the command."""
    usual = command.get_help_option

    def help_option(ctx: Any) -> Any:
        found = usual(ctx)
        if found is not None:
            found.metavar = ""
        return found

    command.get_help_option = help_option
    for inner in getattr(command, "commands", {}).values():
        tidy(inner)
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None  # the name of an argument says enough
            continue
        if parameter.is_flag:
            parameter.metavar = ""
        elif parameter.metavar is None:
            parameter.metavar = "N"
        shown = parameter.show_default
        if isinstance(shown, str) or (shown and parameter.default is not None and not parameter.is_flag):
            value = shown if isinstance(shown, str) else parameter.default
            parameter.help = f"{parameter.help} [dim]\\[default: {value}][/dim]"
        parameter.show_default = False
    return command


app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, simulate, compare, plan, replay, report, watch, launch, demo):
    # What follows the script of `launch` is the script's own.
    settings = {"allow_interspersed_args": False} if command is launch else {}
    app.command(epilog=epilog(command.__name__), context_settings=settings)(command)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"quorate {version('quorate')}")
        except PackageNotFoundError:  # a source tree that is not installed
            typer.echo("quorate 0+unknown")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def quorate(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Say which release this is.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Distributed PyTorch training on slow, uneven or dying workers."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
