"""The commands and the two options of `quorate` itself."""

from __future__ import annotations

from typing import Annotated

import typer

from quorate.cli.compare import compare
from quorate.cli.demo import demo
from quorate.cli.plan import plan
from quorate.cli.replay import replay
from quorate.cli.report import report
from quorate.cli.simulate import simulate
from quorate.cli.train import train
from quorate.cli.watch import watch

app = typer.Typer(
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (train, simulate, compare, plan, replay, report, watch, demo):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"quorate {version('quorate')}")
        except PackageNotFoundError:  # run from a source tree that is not installed
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
