"""From options to a run: what `simulate`, `compare` and `demo` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quorate.cli import Stopped
from quorate.cli._options import ClusterOptions, EndOptions, SubjectOptions, UpdateOptions
from quorate.cli._policies import Workers, parse_workers, shown
from quorate.cli._progress import Reporter
from quorate.errors import BadInput, unknown_name
from quorate.policies import Policy
from quorate.trace import TRACE_FILE, Recorder

if TYPE_CHECKING:
    from quorate.conditions import Until
    from quorate.learner import Learning
    from quorate.running import Result

ENGINES = ("simulated",)
DEFAULT_UPDATES = 1000
READY_TASK_WITH_EPOCHS = "digits"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all runs of a command have in common."""

    workers: Workers
    cluster: ClusterOptions
    seed: int
    task: str | None  # None: no gradients
    samples: int | None
    batch_size: int | None
    model_bytes: int | None
    updates: int | None
    epochs: int | None
    until: Until | None
    learning: Learning
    update: UpdateOptions

    def run(
        self,
        policy: Policy,
        label: str,
        reporter: Reporter,
        *,
        task: str | None = None,
        out: Path | None = None,
        together: bool | None = None,
        recorders: tuple[Recorder, ...] = (),
    ) -> Result:
        """One run; `task` replaces the plan's. Ctrl-C ends it with a sentence that says what is left."""
        import quorate

        engine = quorate.Simulated(
            self.workers.total,
            self.cluster.latency,
            network=self.cluster.network,
            faults=self.cluster.faults,
            device=self.update.device or "cpu",
            together=together,
            model_bytes=self.model_bytes,
        )
        reporter.begin(label)
        try:
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
                evaluate_every=self.update.evaluate_every,
                patience_s=self.cluster.patience,
                on_progress=reporter,
                recorders=recorders,
            )
        except KeyboardInterrupt:
            raise Stopped(_what_is_left(label, reporter, out)) from None


def make_plan(subject: SubjectOptions, cluster: ClusterOptions, end: EndOptions, update: UpdateOptions) -> Plan:
    """Read and check what the options say."""
    from quorate.conditions import parse_until
    from quorate.learner import Learning

    workers = parse_workers(cluster.workers)
    if subject.no_gradients:
        for name in update.given():
            raise BadInput(
                f"{shown(name, getattr(update, name))} was given, but it needs gradients; "
                f"leave it out or leave out --no-gradients"
            )
    until = None if end.until is None else parse_until(end.until)
    learning = Learning(clip_norm=update.clip_norm, ema=update.ema, delay_compensation=update.delay_compensation)
    updates, epochs = _end(subject, end)
    common: dict[str, Any] = {
        "workers": workers,
        "cluster": cluster,
        "seed": subject.seed,
        "updates": updates,
        "epochs": epochs,
        "until": until,
        "learning": learning,
        "update": update,
    }
    if not subject.no_gradients:
        return Plan(task=subject.task, batch_size=subject.batch_size, samples=None, model_bytes=None, **common)
    return Plan(task=None, **_sizes(subject, epochs), **common)


def _end(subject: SubjectOptions, end: EndOptions) -> tuple[int | None, int | None]:
    """Updates and epochs; by default a few epochs, or where there are none, some updates."""
    if end.updates is not None or end.epochs is not None or end.until is not None:
        return end.updates, end.epochs
    if subject.no_gradients:
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


def check_engine(name: str) -> None:
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads inside torch, until the block ends."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _what_is_left(label: str, reporter: Reporter, out: Path | None) -> str:
    last = reporter.last
    where = "before the first update" if last is None else f"at update {last.updates:,} ({last.seconds:.4g} s virtual)"
    kept = "nothing was recorded, since there was no --out"
    if out is not None:
        trace = out / TRACE_FILE
        kept = f"the trace so far is in {str(trace)!r}" if trace.exists() else "nothing was written"
    return f"stopped {label} {where}; {kept}"
