"""`quorate train --resume`: what may be said again, and that it says the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quorate.cli._engines import RAY
from quorate.cli._options import EndOptions
from quorate.cli._policies import Workers, label, parse_workers, shown
from quorate.cli._progress import Attendance, reporter, starting
from quorate.cli._ray_options import ANEW, RayOptions, parse_resources, resources_text
from quorate.cli._running import at_work
from quorate.cli._stopping import telling_what_is_left
from quorate.errors import BadInput
from quorate.faults import parse_faults
from quorate.latency import parse_latency
from quorate.policies import make_policy
from quorate.trace import read_header

if TYPE_CHECKING:
    from quorate.running import Result

#: What is new each time, so that it contradicts nothing.
FREE = ("resume", "task", "updates", "epochs", "until", "checkpoint_every", "patience", "quiet", "json")


def given_options(context: typer.Context) -> dict[str, Any]:
    """The options that stood on the command line, with their values."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {
        name: context.params[name]
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def go_on(
    run: Path,
    given: dict[str, Any],
    on_ray: RayOptions,
    end: EndOptions,
    patience: float,
    checkpoint_every: int | None,
    quiet: bool,
) -> tuple[Result, str]:
    """Go on with a run as it was recorded; gives its result and its label."""
    import quorate
    from quorate.training import engine_of

    header = read_header(run)
    check_agrees(run, header, given)
    again = on_ray.arguments_anew()
    options = dict(header["policy"])
    name = label(make_policy(options.pop("name"), **options), header["workers"])
    # As many threads as in the workers: a replay evaluates with that number, and must come to the same bits.
    with (
        at_work(header["engine"].get("threads", 1)),
        reporter(quiet) as report,
        telling_what_is_left(name, report, run, on_ray.to_say_again()),
    ):
        report.begin(name, starting(header["workers"], header["engine"]["name"]))
        result = quorate.resume(
            run,
            given.get("task"),
            engine_of(header["engine"], header["workers"], **again) if again else None,
            updates=end.updates,
            epochs=end.epochs,
            until=end.until,
            patience_s=patience,
            checkpoint_every=checkpoint_every,
            on_progress=report,
            recorders=(Attendance(report),),
        )
    return result, name


def check_agrees(run: Path, header: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse options that say otherwise than the recorded run; what is said again in the same words is fine."""
    recorded = _recorded(run, header)
    free = (*FREE, *ANEW) if header["engine"]["name"] == RAY else FREE
    for name, value in given.items():
        if name in ANEW and name not in free:
            raise BadInput(
                f"{shown(name, value)} was given, but the run in {str(run)!r} was not made on Ray; leave it out"
            )
        if name in free or _same(name, value, recorded.get(name), header["policy"]["name"]):
            continue
        there = recorded.get(name)
        made = f"without --{name.replace('_', '-')}" if there is None else f"with {shown(name, there)}"
        raise BadInput(
            f"{shown(name, value)} was given, but the run in {str(run)!r} was made {made}; "
            f"leave it out, or start a new run"
        )


def _recorded(run: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Every option of `quorate train` as the recorded run had it; None: it was not used."""
    engine, policy = header["engine"], header["policy"]
    quorum = next((policy[name] for name in ("quorum", "gradients", "k") if policy.get(name) is not None), None)
    workers = header["workers"]
    return {
        **{name: value for name, value in policy.items() if name not in ("name", "quorum", "backups")},
        **header["learning"],
        **{name: engine.get(name) for name in ("threads", "device", "latency", "faults", "wire")},
        **{name: engine.get(name) for name in ("shards", "cpus", "gpus")},
        "resources": resources_text(engine.get("resources", {})),
        "engine": engine["name"],
        **{name: header[name] for name in ("batch_size", "seed", "evaluate_every")},
        "policy": policy["name"],
        "workers": str(workers) if quorum is None or quorum >= workers else f"{quorum}+{workers - quorum}",
        "out": str(run),
    }


def _same(name: str, given: Any, recorded: Any, policy: str) -> bool:
    """Whether two values of an option mean the same."""
    if name == "workers":
        return _same_workers(parse_workers(given), parse_workers(recorded), policy)
    read: dict[str, Callable[[str], Any]] = {
        "latency": lambda text: parse_latency(text).text(),
        "faults": parse_faults,
        "resources": lambda text: parse_resources("resources", text),
        "out": lambda text: Path(text).resolve(),
    }
    if recorded is not None and name in read:
        return bool(read[name](given) == read[name](recorded))
    return bool(given == recorded)


def _same_workers(given: Workers, recorded: Workers, policy: str) -> bool:
    """Only for backups does a plain number say something of the quorum too."""
    if not given.backups and policy != "backup":
        return given.total == recorded.total
    return given == recorded
