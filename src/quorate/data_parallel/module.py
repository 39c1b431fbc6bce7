"""`DataParallel`, a drop-in for DistributedDataParallel in which a slow process need not hold up the others."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quorate.checkpoint_schedule import warn
from quorate.data_parallel.buckets import MOST_PIECES, MOST_PIECES_DELAYED, BucketLayout, buffers_of, piece_bytes_for
from quorate.data_parallel.control.link import LONG_S, HangWarning
from quorate.data_parallel.coordinator_thread import (
    ControlPlane,
    extra_of_version,
    fail_all,
    folder_after_restarts,
    pass_on,
)
from quorate.data_parallel.engine import check_collective
from quorate.data_parallel.full_sync import FullSyncPlane
from quorate.data_parallel.iterations import FullSyncIterations, IterationOver, Iterations, QuorumIterations, Receipt
from quorate.data_parallel.lazy_tensors import Guard
from quorate.data_parallel.optimizer_steps import PartialSteps, Takeover, check_parameters
from quorate.data_parallel.process_group import (
    Checker,
    ProcessGroup,
    check_same_model,
    check_same_values,
    check_there_is_a_group,
)
from quorate.data_parallel.quorum import QuorumPlane
from quorate.data_parallel.resuming import saving_if_asked
from quorate.data_parallel.sampler import Sampler
from quorate.data_parallel.saving import Saver
from quorate.errors import BadInput, QuorateError, check_at_least
from quorate.learner import digest
from quorate.ledger import Ledger
from quorate.policies import FullSync, Policy
from quorate.user_code import as_policy

#: Share of all-reduce time spent waiting for cores from which on rounds are sent after backward, not during it.
CONTENDED = 0.45
#: Seconds of silence after which another process counts as lost.
DEFAULT_PATIENCE_S = 60.0
#: Time for threads to notice the end.
_NOTICE_S = 0.5
_ONE_WRAPPER = "{}: wrap the bare module in one of them, not in both"


class DataParallel(nn.Module):
    """Trains a module in all processes of a torch.distributed process group under a policy.

    module: the same module in every process; all processes start with worker 0's parameters.
    optimizer: made of the module's parameters. Its `step()` takes part in the round and returns a `Receipt`.
    policy: FullSync (the default), Delayed, BackupSync, Deadline, AdaptiveBackup or one of your own
        (docs/extending.md), for as many workers as processes.
    process_group: the processes that train together (default: all).
    sampler: a `quorate.Sampler`, so that each sample counts exactly once per epoch even if gradients are dropped.
    clip_norm: scale the averaged gradient down to this global norm. (`clip_grad_norm_` works too, but waits for it.)
    bucket_bytes: size of one all-reduce.
    overlap: False lets `step()` return only when the update is applied.
    out: a folder for the trace and summary of the run, for `quorate report`, `plan` and `watch`; worker 0's counts.
    checkpoint: a folder to save checkpoints in, and to resume from after a restart.
    checkpoint_every: updates between checkpoints.
    also: other objects to save in a checkpoint, by name: schedulers, scalers, averaged models.
    check_every: compare the parameters of all processes after every `check_every`-th version.
    patience_s: seconds of silence after which another process counts as lost. A process that has waited for
        half of it (30 s at most) while no process computes warns, and names the processes it waits for.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        policy: Policy | str | None = None,
        *,
        process_group: Any = None,
        sampler: Sampler | None = None,
        clip_norm: float | None = None,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        out: str | Path | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 1,
        also: Mapping[str, Any] | None = None,
        check_every: int | None = None,
        patience_s: float = DEFAULT_PATIENCE_S,
    ) -> None:
        super().__init__()
        check_there_is_a_group()
        for inside in module.modules():
            if isinstance(inside, nn.parallel.DistributedDataParallel | DataParallel):
                raise BadInput(_ONE_WRAPPER.format(f"quorate.DataParallel got a {type(inside).__name__}"))
        self.policy = FullSync() if policy is None else as_policy(policy)
        check_collective(self.policy)
        self._decides = not self.policy.takes_everybody
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        check_parameters(named, optimizer)
        for option, value in {"clip_norm": clip_norm, "bucket_bytes": bucket_bytes, "patience_s": patience_s}.items():
            if value is not None and not value > 0:
                raise BadInput(f"{option} is {value}, but it must be above 0")
        self.module, self.optimizer = module, optimizer
        self._device = named[0][1].device
        self.processes = ProcessGroup(process_group, self._device)
        self.policy.check(self.workers)
        self.processes.meet()
        buffers = buffers_of(module)
        check_same_model(self.processes, [*named, *buffers], optimizer, repr(self.policy))
        for tensor in module.state_dict().values():
            if isinstance(tensor, Tensor):
                self.processes.broadcast(tensor.detach())
        self._saver, resumed = saving_if_asked(
            self.processes,
            self._device,
            checkpoint,
            lambda: Saver(checkpoint or "", module, optimizer, also, checkpoint_every, worker=self.worker),
            also,
        )
        version, extra = (0, {}) if resumed is None else (resumed.version, resumed.extra)
        if sampler is not None and "sampler" in extra:
            sampler.restore(extra["sampler"])
        self._sampler, self._overlap = sampler, overlap
        # Threads, hooks and the optimizer hold no reference to this object, so it is freed when the script drops it.
        self._control = ControlPlane()
        self.receipt: Receipt | None = None
        self._warned: set[str] = set()
        self._is_finished = False
        self._is_traced = any(self.processes.gather_bytes(b"trace" if out is not None else b""))
        parameters = [one for _, one in named]
        if bucket_bytes is None:
            most = MOST_PIECES_DELAYED if self.policy.takes_everybody and self.policy.history else MOST_PIECES
            bucket_bytes = piece_bytes_for(parameters, most, self.processes.share_cores())
        layout = BucketLayout(parameters, [one for _, one in buffers], self.workers, bucket_bytes)
        self._iterations = self._make_iterations(layout, PartialSteps(optimizer), clip_norm, version)
        self._plane = self._iterations.plane
        samples = 1 if sampler is None else sampler.per_step
        self._plane.expected = float(self.policy.begin(self.workers).per_update * samples)
        if isinstance(self._plane, FullSyncPlane):
            self._plane.holds_back = not self._plane.delay and self.processes.contention() >= CONTENDED
            if sampler is not None and sampler.is_uneven(self.workers):
                self._plane.leader = 0  # Worker 0 is in every round; the schedules of other workers may fall behind.
        self._checker = Checker(check_every, named, self._plane, self._control.send)
        limit_s = min(LONG_S, patience_s / 2)
        self._watch = HangWarning(self.worker, self.workers, self._iterations.waits, self._control.send, limit_s)
        self._control.connect(
            self.processes,
            partial(pass_on, self._watch, self._checker, sampler, self._iterations),
            partial(fail_all, self._plane, sampler),
            self._watch.beat,
            patience_s,
        )
        if sampler is not None:
            calls = self._iterations.catch_up, self._iterations.pass_over, self._iterations.pass_begins
            sampler.bind(self.worker, self.workers, self._decides, self._control.send, *calls)
        self._start_coordinator(out, extra.get("ledger"))
        if self._saver is not None:
            self._plane.before_complete = self._saver.settle
            if sampler is not None:
                sampler.handing_out = self._saver.handing_out
            if self._decides:
                self._saver.follow(self._plane, partial(extra_of_version, sampler, self._control))
        self._guard = Guard(module, self._plane.gate)
        this = weakref.ref(self)
        self._takeover = Takeover(optimizer, lambda: this()._step(), self._plane.synchronize)  # type: ignore[union-attr]
        self._at_exit = AtExit(self)
        self._plane.start()

    def _make_iterations(
        self, layout: BucketLayout, steps: PartialSteps, clip_norm: float | None, version: int
    ) -> Iterations:
        plane = (layout, self.processes, self.worker, steps)
        if self._decides:
            finishes_late = self.policy.late == "finish"
            decided = QuorumPlane(*plane, clip_norm=clip_norm)
            return QuorumIterations(decided, steps, self._sampler, self._control.send, version, finishes_late)
        make = partial(FullSyncPlane, *plane, clip_norm=clip_norm)
        if self.policy.history:
            make = partial(make, delay=self.policy.history, delay_at=self.policy.delay_at)
        return FullSyncIterations(make, steps, self._sampler, self._control.send, version, self._is_traced)

    def _start_coordinator(self, out: str | Path | None, ledger_state: dict[str, Any] | None) -> None:
        """In worker 0's process: start the thread that lets the policy decide, or only writes the trace."""
        if not self._decides and not self._is_traced:
            return
        ledger: Ledger = Ledger(None, 1)
        if self._sampler is not None:
            ledger = self._sampler.ledger(self.workers, self._decides, self._control.tell)
        if ledger_state is not None:
            ledger.restore(ledger_state)
        coordinator = self._control.start_coordinator(
            self.policy,
            ledger,
            decides=self._decides,
            first_version=self._iterations.base,
            out=folder_after_restarts(out),
            parameter_bytes=sum(one.numel() * one.element_size() for one in self._plane.layout.parameters),
            describe={"backend": self.processes.backend, "device": str(self._device)},
        )
        if coordinator is not None:
            self._plane.on_version.append(coordinator.version_made)

    # ------------------------------------------------------------ training

    @property
    def worker(self) -> int:
        """The number of this process among the workers."""
        return self.processes.worker

    @property
    def workers(self) -> int:
        """The number of processes."""
        return self.processes.workers

    @property
    def version(self) -> int:
        """The number of updates in the parameters that the next iteration reads."""
        return self._iterations.version

    @property
    def late(self) -> bool:
        """Whether the version that this process computes on is over, so that its gradient will be dropped."""
        return self._iterations.is_late

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            self._before_compiled(*inputs)
        else:
            self._before_forward(*inputs)
        return self.module(*inputs, **named)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_compiled(self, *inputs: Any) -> None:
        self._before_forward(*inputs)
        self.synchronize()  # Compiled code reads parameters without the guarded dictionaries.

    def _before_forward(self, *inputs: Any) -> None:
        self._raise_if_failed()
        if not torch.is_grad_enabled() or self._is_finished:
            return
        if self._saver is not None and self._saver.is_waiting:
            self.synchronize()
            self._saver.take()
        first = inputs[0] if inputs else None
        self._watch.began()
        self._iterations.begin(first.shape[0] if isinstance(first, Tensor) and first.dim() else None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in this process only during the backward passes in this context, as with DDP."""
        before, self._iterations.syncing = self._iterations.syncing, False
        try:
            yield
        finally:
            self._iterations.syncing = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward passes send their gradients: an attribute of DDP that some scripts set."""
        return self._iterations.syncing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncing: bool) -> None:
        self._iterations.syncing = bool(syncing)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """Abandon the iteration in this context as soon as its version is over: its gradient would be dropped.

        Put `with model.iteration():` around forward, backward and step. An abandoned iteration skips the rest of it.
        """
        was_interrupted = False
        self._iterations.listen(True)
        try:
            yield
        except IterationOver:
            was_interrupted = True
        finally:
            self._iterations.listen(False)
        receipt = self._iterations.give_up(was_interrupted)
        if receipt is not None:
            self.receipt = receipt
            self._save_if_due(receipt)

    def _step(self) -> Receipt:
        self._raise_if_failed()
        was_over = self.receipt is not None and self.receipt.over
        self.receipt = self._iterations.step()
        self._watch.ended()
        self._warn_of_unused_work(self.receipt, was_over)
        self._save_if_due(self.receipt)
        if self._overlap:
            self._guard.settle()
        else:
            self.synchronize()
        return self.receipt

    def _warn_of_unused_work(self, receipt: Receipt, was_over: bool) -> None:
        """Warn once of lost samples, and once of iterations after the end."""
        lost = not receipt.applied and not receipt.over and receipt.lost_samples != 0
        if lost and "lost" not in self._warned:
            self._warned.add("lost")
            warn(
                f"a gradient of {receipt.lost_samples or 'some'} samples was not used ({receipt.reason}), and they do "
                "not come again in this epoch; to use each sample exactly once, draw them from a quorate.Sampler "
                "instead of a DistributedSampler: sampler = quorate.Sampler(data, batch_size=…), "
                "DataParallel(…, sampler=sampler), DataLoader(data, batch_sampler=sampler)"
            )
        if receipt.over and was_over and "over" not in self._warned:
            self._warned.add("over")
            warn(
                f"no more updates are made ({receipt.reason}), so gradients of process {self.worker} are not used; "
                "to end a counting loop together with the other processes, write: for step in model.steps(…)"
            )

    def _save_if_due(self, receipt: Receipt) -> None:
        if self._saver is not None and not receipt.over and self._saver.is_due(receipt.version):
            self._saver.reached(receipt.version, self._extra(receipt.version))

    def _extra(self, version: int) -> dict[str, Any]:
        return extra_of_version(self._sampler, self._control if self._decides else None, version)

    def synchronize(self) -> None:
        """Wait until every update that the next iteration reads is applied."""
        self._plane.synchronize()

    def meet(self) -> int:
        """Wait until all processes call this; then all have the newest version. Returns that version.

        Call this between two iterations, before an operation of all processes: an all-reduce, a barrier, an evaluation,
        a checkpoint. With `Delayed`, pending updates are applied. A process that waits for a quorum while the others
        wait here goes on without an update (`Receipt.applied` is False).
        """
        if not self._is_finished:
            self._raise_if_failed()
            self._iterations.where = "model.meet()"
            self._iterations.meet()
        return self.version

    def steps(self, count: int, *, meet_every: int | None = None) -> Iterator[int]:
        """The numbers of the updates up to `count`, for loops with a fixed length: `for step in model.steps(1000):`.

        The loop's body makes one iteration, on version `step`. Under a quorum a late process skips the numbers of
        versions that were made without it. All processes end together at the same version; they also end when the
        other processes have ended. A resumed run starts at the version of its checkpoint.

        meet_every: at every multiple of this, which no process skips, all processes `meet` before the body, which may
            then use collectives. The end of a pass of a `quorate.Sampler` is no meeting in this loop.
        """
        check_at_least("count", count, 0)
        if meet_every is not None:
            check_at_least("meet_every", meet_every, 1)
        sampler = None if self._decides else self._sampler
        if meet_every == 1 and sampler is not None and sampler.is_uneven(self.workers):
            raise BadInput(
                "meet_every is 1, but some processes have no batch in the last round of an epoch; take 2 or more, "
                "or a batch_size that gives every process equally many batches"
            )
        met, every = None, meet_every or count or 1
        if self._sampler is not None:
            self._sampler.run_on(True)
        try:
            while not self._is_finished and not (self.receipt is not None and self.receipt.over):
                self._raise_if_failed()
                number = self._iterations.number()
                if number >= count:
                    break
                if meet_every is not None and number % every == 0 and number != met:
                    self.meet()
                    met = number
                else:
                    self._iterations.until = min(count, number + every - number % every)
                    yield number
        finally:
            self._iterations.until = None
            if self._sampler is not None:
                self._sampler.run_on(False)
        self.meet()

    def digest(self) -> str:
        """A digest of this process's parameters and buffers."""
        return digest({name: tensor.detach().cpu() for name, tensor in self._state().items()})

    def check_identical(self) -> str:
        """Compare parameters and buffers between all processes; all must call this at the same version."""
        return check_same_values(self.processes, self._state().items(), self.version)

    def _state(self) -> dict[str, Any]:
        """Parameters and buffers of the current version, without changes to buffers by later, delayed iterations."""
        self._plane.quiesce()
        named = self.module.named_buffers(remove_duplicate=False)
        agreed = {name: self._plane.agreed_buffers.get(buffer, buffer) for name, buffer in named}
        return {name: agreed.get(name, one) for name, one in self.module.state_dict().items()}

    def record(self, **measures: float) -> None:
        """Write measures of the newest version, such as a loss or an accuracy, into the trace."""
        if self._decides or self._is_traced:
            values = {name: float(value) for name, value in measures.items()}
            self._control.send("record", version=self.version, measures=values)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Refuse DistributedDataParallel, which reads this attribute: both wrappers would make every update."""
        raise BadInput(_ONE_WRAPPER.format("DistributedDataParallel got a quorate.DataParallel"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)  # Unlike the module's, this reads no parameter and so does not wait.

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        """Send no more gradients; returns when all processes have finished, with the same parameters in all."""
        if self._is_finished:
            return
        self._raise_if_failed()
        self._iterations.where = "model.finish()"
        try:
            self._iterations.finish()
            if self._saver is not None:
                between = self._sampler is not None and self._sampler.between_epochs
                self._saver.save(self.version, {**self._extra(self.version), "between_epochs": between})
                self._saver.close()
        finally:
            self._release()
        self._control.close()

    def abort(self) -> None:
        """End without waiting for the other processes, which are notified."""
        if not self._is_finished:
            self._plane.fail(QuorateError("the model was aborted"))
            self._release()
            self._control.close()

    def wait_for_threads(self, limit_s: float) -> None:
        """Wait up to `limit_s` for the threads of the data plane."""
        self._plane.wait_for_threads(limit_s)

    def _release(self) -> None:
        self._is_finished = True
        self._at_exit.cancel()
        self._takeover.give_back()
        self._iterations.close()
        self._guard.remove()
        self._plane.release()
        if self._sampler is not None:
            self._sampler.let_go()

    def __del__(self) -> None:
        if "_at_exit" in self.__dict__ and not self._is_finished:
            self._at_exit.dropped(self)

    def _raise_if_failed(self) -> None:
        if self._plane.error is not None:
            raise self._plane.error


class AtExit:
    """Finishes a model when the interpreter ends, unless the script did; after a failure it aborts the run.

    A failure is an uncaught exception, or `sys.exit` with a status other than 0. Exit handlers cannot see that status,
    so `sys.exit` is replaced while the model trains.
    """

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)
        self._kept: Any = None  # keeps a dropped model alive until the script ends
        self._left: tuple[Any, int] | None = None  # exit status, and the model's version at that time
        self._exit, self._replacement = sys.exit, self._leave
        sys.exit = self._replacement  # type: ignore[assignment]
        atexit.register(self._at_exit)

    def cancel(self) -> None:
        atexit.unregister(self._at_exit)
        if sys.exit is self._replacement:
            sys.exit = self._exit

    def _leave(self, status: Any = None) -> None:
        model = self._model()
        if model is not None and status not in (None, 0):
            self._left = status, model.version
        self._exit(status)

    def dropped(self, model: Any) -> None:
        """The script has dropped an unfinished model: finish it with the other processes, as at the script's end."""
        if self._left is not None:
            self._kept = model  # the script is about to end
        elif threading.current_thread().name.startswith("quorate-"):  # the garbage collector ran in it
            threading.Thread(target=_end, args=(model,), name="quorate-ending").start()
        else:
            _end(model)

    def _at_exit(self) -> None:
        model = self._model()
        if model is None:
            return
        failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        # A script may catch its own SystemExit and continue training.
        left = None if self._left is None or self._left[1] != model.version else self._left[0]
        if failure is None and left is None:
            _end(model)
            return
        model.abort()
        model.wait_for_threads(_NOTICE_S)
        _end_at_once(130 if isinstance(failure, KeyboardInterrupt) else left if isinstance(left, int) else 1)


def _end(model: Any) -> None:
    with suppress(QuorateError):  # already reported where it happened
        model.finish()


def _end_at_once(status: int) -> None:
    """Exit without Python's finalization, in which gloo may abort the process, so that its status is lost.

    A thread inside an all-reduce needs the interpreter when another process is gone, and gloo's own threads may still
    run when their group is destroyed.
    """
    atexit._run_exitfuncs()  # the remaining exit handlers
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if status == 130:  # exit like Python after Ctrl-C, so that a shell sees it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)
