"""From options to a run, and the message about a run that ended early."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.cli.engine_options import Place
from quorate.cli.options import EndOptions, TaskOptions, UpdateOptions
from quorate.cli.policy_options import flag_text
from quorate.cli.progress import AliveWorkers, Reporter, starting
from quorate.cli.signals import INTERRUPTED, TERMINATED, Stopped, Terminated
from quorate.errors import BadInput, LearnerLost, QuorumLost, WorkerFailed, check_at_least
from quorate.policies import Policy
from quorate.reporting.comparison import command_to_go_on
from quorate.schema import MOST_THREADS
from quorate.trace import TRACE_FILE, Recorder

if TYPE_CHECKING:
    from quorate.run import Result


RUNS = Path("runs")


@contextmanager
def folder_for_run(given: Path | None) -> Iterator[Path]:
    """The given folder, or the next number in runs/, which is removed again if it stays empty."""
    if given is not None:
        yield given
        return
    folder = _next_folder()
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty: it is kept
            folder.rmdir()
            RUNS.rmdir()


def _next_folder() -> Path:
    """Create the folder at once, so that two commands started together get different ones."""
    try:
        RUNS.mkdir(exist_ok=True)
        taken = [int(entry.name) for entry in RUNS.iterdir() if entry.name.isdecimal()]
        number = max(taken, default=0)
        while True:
            number += 1
            with suppress(FileExistsError):
                folder = RUNS / f"{number:03}"
                folder.mkdir()
                return folder
    except OSError as error:
        raise BadInput(f"no folder can be made in {str(RUNS)!r}: {error.strerror}; name one with --out") from error


NO_UPDATE = "before the first update"


@contextmanager
def resume_hint(label: str, reporter: Reporter, out: Path | None, again: str = "") -> Iterator[None]:
    """If the run inside the block ends early, say at which update, and how to resume it.

    again: options that the resume command must repeat, because they are not recorded.
    """
    from quorate import Interrupted

    try:
        yield
    except Interrupted as ended:
        metrics = ended.result.metrics
        where = f"after update {metrics.updates:,} ({metrics.seconds:.4g} s)" if metrics.updates else NO_UPDATE
        status = TERMINATED if ended.signal == "SIGTERM" else INTERRUPTED
        raise Stopped(f"stopped {label} {where}; {_what_is_left(ended.result.out, again, real=True)}", status) from None
    except (KeyboardInterrupt, Terminated) as signal:
        by_sigterm = isinstance(signal, Terminated) or signal.args == ("SIGTERM",)
        status = TERMINATED if by_sigterm else INTERRUPTED
        raise Stopped(
            f"stopped {label} {_how_far(reporter)}; {_what_is_left(out, again, reporter.real)}", status
        ) from None
    except Exception as error:
        has_run = reporter.last is not None or isinstance(error, QuorumLost | WorkerFailed | LearnerLost)
        out = getattr(error, "run_folder", out)
        if has_run and out is not None and _last_checkpoint(out) is not None:
            error.add_note(f"to go on: {command_to_go_on(out, again)}")
        raise


def _how_far(reporter: Reporter) -> str:
    last = reporter.last
    if last is None:
        return NO_UPDATE
    return f"at update {last.updates:,} ({last.seconds:.4g} s{'' if reporter.real else ' virtual'})"


def _what_is_left(out: Path | None, again: str, real: bool) -> str:
    if out is None:
        return "nothing was recorded, since there was no --out"
    version = _last_checkpoint(out)
    if version is not None:
        return f"the checkpoint of update {version:,} is in {str(out)!r}; to go on: {command_to_go_on(out, again)}"
    trace = out / TRACE_FILE
    kept = f"the trace so far is in {str(trace)!r}" if trace.exists() else "nothing was written"
    return f"there is no checkpoint to go on from, {kept}" if real else kept


def _last_checkpoint(out: Path) -> int | None:
    from quorate.checkpoint import CheckpointFolder

    return max(CheckpointFolder(out).versions(), default=None)


DEFAULT_UPDATES = 1000
READY_TASK_WITH_EPOCHS = "digits"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Settings that all runs of a command have in common."""

    task: str | None  # None: no gradients
    workers: int
    place: Place
    model_bytes: int | None
    options: dict[str, Any]  # further arguments of `quorate.train`

    def run(
        self,
        policy: Policy,
        label: str,
        reporter: Reporter,
        *,
        task: str | None = None,
        out: Path | None = None,
        checkpoint_every: int | None = None,
        recorders: tuple[Recorder, ...] = (),
    ) -> Result:
        """Make one run; `task` replaces that of the spec. A signal ends it with a message on how to resume."""
        import quorate

        engine = self.place.engine(self.workers, self.model_bytes)
        reporter.begin(label, starting(self.workers, engine.name) if self.place.real else None)
        if self.place.real:
            recorders = (*recorders, AliveWorkers(reporter))
        with resume_hint(label, reporter, out, self.place.options_to_repeat):
            return quorate.train(
                self.task if task is None else task,
                policy,
                engine,
                out=out,
                checkpoint_every=checkpoint_every,
                on_progress=reporter,
                recorders=recorders,
                **self.options,
            )


def make_run_spec(
    subject: TaskOptions, workers: int, place: Place, patience: float, end: EndOptions, update: UpdateOptions
) -> RunSpec:
    """Read and check the options."""
    from quorate.learner import Learning
    from quorate.stopping import parse_until

    if subject.no_gradients:
        for name in update.given():
            raise BadInput(
                f"{flag_text(name, getattr(update, name))} was given, but it needs gradients; "
                f"leave it out or leave out --no-gradients"
            )
    until = None if end.until is None else parse_until(end.until)
    learning = Learning(clip_norm=update.clip_norm, ema=update.ema, delay_compensation=update.delay_compensation)
    with redirect_stdout(sys.stderr):  # a task's file may print; stdout is for the result
        updates, epochs = _end(subject, end)
        sizes = _sizes(subject, epochs) if subject.no_gradients else {"batch_size": subject.batch_size}
    return RunSpec(
        task=None if subject.no_gradients else subject.task,
        workers=workers,
        place=place,
        model_bytes=sizes.pop("model_bytes", None),
        options={
            "updates": updates,
            "epochs": epochs,
            "until": until,
            "seed": subject.seed,
            "evaluate_every": update.evaluate_every,
            "patience_s": patience,
            **learning.options(),
            **sizes,
        },
    )


def _end(subject: TaskOptions, end: EndOptions) -> tuple[int | None, int | None]:
    """Updates and epochs; by default 20 epochs, or 1000 updates if the data is a stream or is not used."""
    if end.updates is not None or end.epochs is not None or end.until is not None:
        return end.updates, end.epochs
    if subject.no_gradients:
        return DEFAULT_UPDATES, None
    if subject.task != READY_TASK_WITH_EPOCHS:
        from quorate.task import bind_task

        if bind_task(subject.task, subject.batch_size).samples() is None:
            return DEFAULT_UPDATES, None
    return None, end.default_epochs


def _sizes(subject: TaskOptions, epochs: int | None) -> dict[str, Any]:
    """Sizes of the task's batch, data and model; the size of the data only matters with epochs."""
    import torch

    from quorate.task import bind_task

    bound = bind_task(subject.task, subject.batch_size)
    samples = bound.samples()
    if samples is not None and bound.batch_size > samples:
        raise BadInput(f"batch_size is {bound.batch_size}, but the data set has only {samples} samples; choose fewer")
    if epochs is None:
        samples = None  # without epochs, batches are an endless stream
    elif samples is None:
        raise BadInput(f"epochs is {epochs}, but the data of {subject.task} is an endless stream; give --updates")
    model_bytes = subject.model_bytes
    if model_bytes is None:
        parameters = bound.model(subject.seed, torch.device("cpu")).parameters()
        model_bytes = sum(one.numel() * one.element_size() for one in parameters if one.requires_grad)
    return {"samples": samples, "batch_size": bound.batch_size, "model_bytes": model_bytes}


@contextmanager
def run_environment(threads: int) -> Iterator[None]:
    """Set the number of torch threads inside the block, and redirect stdout to stderr.

    Stdout is for the result alone, so output of the task goes to stderr, like that of the workers.
    """
    import torch

    check_at_least("threads", threads, 1, MOST_THREADS)  # torch accepts any number, and crashes later
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        torch.set_num_threads(before)
