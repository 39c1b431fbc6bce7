"""From options to a run: what the commands that train share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.cli._engines import Place
from quorate.cli._options import EndOptions, LearningOptions, SubjectOptions, TaskOptions
from quorate.cli._policies import Workers, shown
from quorate.cli._progress import Attendance, Reporter, starting
from quorate.cli._stopping import telling_what_is_left
from quorate.errors import BadInput
from quorate.policies import Policy
from quorate.trace import Recorder

if TYPE_CHECKING:
    from quorate.conditions import Until
    from quorate.learner import Learning
    from quorate.running import Result

DEFAULT_UPDATES = 1000
READY_TASK_WITH_EPOCHS = "digits"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all runs of a command have in common."""

    workers: Workers
    place: Place
    patience: float
    seed: int
    task: str | None  # None: no gradients
    samples: int | None
    batch_size: int | None
    model_bytes: int | None
    updates: int | None
    epochs: int | None
    until: Until | None
    learning: Learning
    evaluate_every: int | None

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
        """One run; `task` replaces the plan's. A signal ends it with a sentence that says what is left."""
        import quorate

        workers = self.workers.total
        engine = self.place.engine(workers, policy, self.model_bytes)
        reporter.begin(label, starting(workers, engine.name) if self.place.real else None)
        if self.place.real:
            recorders = (*recorders, Attendance(reporter))
        with telling_what_is_left(label, reporter, out, self.place.to_say_again):
            return quorate.train(
                self.task if task is None else task,
                policy,
                engine,
                updates=self.updates,
                epochs=self.epochs,
                until=self.until,
                seed=self.seed,
                out=out,
                batch_size=self.batch_size,
                samples=self.samples,
                learning=self.learning,
                evaluate_every=self.evaluate_every,
                patience_s=self.patience,
                checkpoint_every=checkpoint_every,
                on_progress=reporter,
                recorders=recorders,
            )


def make_plan(
    subject: TaskOptions,
    workers: Workers,
    place: Place,
    patience: float,
    end: EndOptions,
    update: LearningOptions,
) -> Plan:
    """Read and check what the options say."""
    from quorate.conditions import parse_until
    from quorate.learner import Learning

    only_timed = subject if isinstance(subject, SubjectOptions) and subject.no_gradients else None
    if only_timed is not None:
        for name in update.given():
            raise BadInput(
                f"{shown(name, getattr(update, name))} was given, but it needs gradients; "
                f"leave it out or leave out --no-gradients"
            )
    until = None if end.until is None else parse_until(end.until)
    learning = Learning(clip_norm=update.clip_norm, ema=update.ema, delay_compensation=update.delay_compensation)
    updates, epochs = _end(subject, end, only_timed is not None)
    common: dict[str, Any] = {
        "workers": workers,
        "place": place,
        "patience": patience,
        "seed": subject.seed,
        "updates": updates,
        "epochs": epochs,
        "until": until,
        "learning": learning,
        "evaluate_every": update.evaluate_every,
    }
    if only_timed is None:
        return Plan(task=subject.task, batch_size=subject.batch_size, samples=None, model_bytes=None, **common)
    return Plan(task=None, **_sizes(only_timed, epochs), **common)


def _end(subject: TaskOptions, end: EndOptions, only_timed: bool) -> tuple[int | None, int | None]:
    """Updates and epochs; by default a few epochs, or where there are none, some updates."""
    if end.updates is not None or end.epochs is not None or end.until is not None:
        return end.updates, end.epochs
    if only_timed:
        return DEFAULT_UPDATES, None
    if subject.task != READY_TASK_WITH_EPOCHS:
        from quorate.task import bind_task

        if bind_task(subject.task, subject.batch_size).samples() is None:
            return DEFAULT_UPDATES, None
    return None, end.default_epochs


def _sizes(subject: SubjectOptions, epochs: int | None) -> dict[str, Any]:
    """Batch, data and model as large as the task's; data are only looked at where epochs are counted."""
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
def at_work(threads: int) -> Iterator[None]:
    """So many threads inside torch, until the block ends; what a task prints goes to stderr, as that of workers does.

    Stdout is for the result alone.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        torch.set_num_threads(before)
