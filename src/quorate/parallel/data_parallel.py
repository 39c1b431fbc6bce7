"""A drop-in for DistributedDataParallel: the same script, but a slow process no longer holds the others up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quorate.engines.collective.comparing import check_same_model, check_same_values
from quorate.engines.collective.decided import Decided
from quorate.engines.collective.free_running import FreeRunning
from quorate.engines.collective.groups import Processes, check_there_is_a_group
from quorate.engines.collective.hooks import buffers_of
from quorate.engines.collective.judged import check_collective
from quorate.engines.collective.layout import MOST_PIECES, MOST_PIECES_DELAYED, Layout, piece_bytes_for
from quorate.engines.collective.partial_steps import PartialSteps
from quorate.engines.collective.reading import Guard
from quorate.engines.collective.receipts import Receipt
from quorate.errors import BadInput, QuorateError
from quorate.learner import digest
from quorate.ledger import Ledger
from quorate.parallel.checking import Checker
from quorate.parallel.control import Control, folder_of_this_life
from quorate.parallel.drivers import DecidedDriver, Driver, FreeDriver, IterationOver
from quorate.parallel.ending import AtExit
from quorate.parallel.resuming import saving_if_asked
from quorate.parallel.sampler import Sampler
from quorate.parallel.saving import Saver
from quorate.parallel.stepping import Takeover, check_makes_one_gradient_a_step
from quorate.policies import Delayed, FullSync, Policy

#: Policies under which every process is in every round, so that nobody need be asked.
FREE_RUNNING = ("full-sync", "delayed")
#: Without a word from another process for so long, it counts as lost.
DEFAULT_PATIENCE_S = 60.0


class DataParallel(nn.Module):
    """Trains a module in all processes of a torch.distributed process group, as a policy says.

    module: the same in every process; worker 0's parameters count.
    optimizer: made of the module's parameters. Its `step()` takes part in the round and gives a `Receipt`.
    policy: FullSync (the default), Delayed, BackupSync, Deadline or AdaptiveBackup, for as many workers as processes.
    process_group: which processes (default: all).
    sampler: a `quorate.Sampler`, so that each sample counts exactly once per epoch whatever is dropped.
    clip_norm: clip the averaged gradient to this norm. (`clip_grad_norm_` works too, where it can be waited for.)
    bucket_bytes: how much travels in one all-reduce.
    overlap: False lets `step()` return only when the update is applied.
    trace: a folder for the trace and summary of the run, for `quorate report`, `plan` and `watch`; worker 0's counts.
    checkpoint: a folder to save every `checkpoint_every`-th version in, and to go on from after a restart.
    also: what else belongs to a checkpoint, by name: schedulers, scalers, averaged models.
    check_every: compare the parameters of all processes at every so many versions.
    patience_s: how long another process may be silent.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        policy: Policy | None = None,
        *,
        process_group: Any = None,
        sampler: Sampler | None = None,
        clip_norm: float | None = None,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        trace: str | Path | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int = 1,
        also: Mapping[str, Any] | None = None,
        check_every: int | None = None,
        patience_s: float = DEFAULT_PATIENCE_S,
    ) -> None:
        super().__init__()
        check_there_is_a_group()
        self.policy = FullSync() if policy is None else policy
        check_collective(self.policy)
        named = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        _check_parameters(named, optimizer)
        for option, value in {"clip_norm": clip_norm, "bucket_bytes": bucket_bytes, "patience_s": patience_s}.items():
            if value is not None and not value > 0:
                raise BadInput(f"{option} is {value}, but it must be above 0")
        self.module, self.optimizer = module, optimizer
        self._device, self._patience_s = named[0][1].device, patience_s
        self.processes = Processes(process_group, self._device)
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
        self.receipt: Receipt | None = None
        self._error: QuorateError | None = None
        self._is_finished = False
        self._is_traced = any(self.processes.gather_bytes(b"trace" if trace is not None else b""))
        parameters = [one for _, one in named]
        if bucket_bytes is None:
            most = MOST_PIECES_DELAYED if isinstance(self.policy, Delayed) and self.policy.delay else MOST_PIECES
            bucket_bytes = piece_bytes_for(parameters, self.processes.pace(), most)
        layout = Layout(parameters, [one for _, one in buffers], self.workers, bucket_bytes)
        self._driver = self._make_driver(layout, PartialSteps(optimizer), clip_norm, version)
        self._plane = self._driver.plane
        self._plane.expected = float(
            self.policy.begin(self.workers).per_update * (1 if sampler is None else sampler.per_step)
        )
        if isinstance(self._plane, FreeRunning) and sampler is not None and sampler.is_uneven(self.workers):
            self._plane.leader = 0  # it is in every round; the schedules of the others fall behind
        self._checker = Checker(check_every, named, self._plane, self._send)
        self._control = Control(self.processes, self._heard, self._failed, patience_s)
        if sampler is not None:
            catch_up = self._driver.catch_up if isinstance(self._driver, DecidedDriver) else None
            sampler.bind(self.worker, self.workers, self._decides, self._send, catch_up)
        self._begin_judging(trace, extra.get("ledger"))
        if self._saver is not None:
            self._plane.before_complete = self._saver.settle
            if self._decides:
                self._saver.follow(self._plane, self._extra)
        self._guard = Guard(module, self._plane.gate)
        self._takeover = Takeover(optimizer, self._step, self.synchronize)
        self._at_exit = AtExit(self)
        self._plane.start()

    def _make_driver(self, layout: Layout, steps: PartialSteps, clip_norm: float | None, version: int) -> Driver:
        plane = (layout, self.processes, self.worker, steps)
        if self._decides:
            finishes_late = getattr(self.policy, "late", "cancel") == "finish"
            decided = Decided(*plane, clip_norm=clip_norm)
            decided.patience_s = self._patience_s
            return DecidedDriver(decided, steps, self._sampler, self._send, version, finishes_late)
        make = partial(FreeRunning, *plane, clip_norm=clip_norm)
        if isinstance(self.policy, Delayed):
            make = partial(make, delay=self.policy.delay, delay_at=self.policy.delay_at)
        return FreeDriver(make, steps, self._sampler, self._send, version, self._is_traced)

    def _begin_judging(self, trace: str | Path | None, ledger_state: dict[str, Any] | None) -> None:
        """In worker 0's process: let the policy decide, or write down what happens."""
        if not self._decides and not self._is_traced:
            return
        ledger: Ledger = Ledger(None, 1)
        if self._sampler is not None:
            ledger = self._sampler.ledger(self.workers, self._decides, self._control.tell)
        if ledger_state is not None:
            ledger.restore(ledger_state)
        judge = self._control.judge(
            self.policy,
            ledger,
            decides=self._decides,
            first_version=self._driver.base,
            out=folder_of_this_life(trace),
            parameter_bytes=sum(one.numel() * one.element_size() for one in self._plane.layout.parameters),
            describe={"backend": self.processes.backend, "device": str(self._device)},
        )
        if judge is not None:
            self._checker.then = judge.version_made

    # ------------------------------------------------------------ what a script sees

    @property
    def worker(self) -> int:
        """Which of the processes this is."""
        return self.processes.worker

    @property
    def workers(self) -> int:
        """How many processes there are."""
        return self.processes.workers

    @property
    def version(self) -> int:
        """How many updates the parameters have had that the next iteration reads."""
        return self._driver.version

    @property
    def late(self) -> bool:
        """Whether the version that this process computes on is over, so that its gradient will be dropped."""
        return self._driver.is_late

    @property
    def _decides(self) -> bool:
        return self.policy.name not in FREE_RUNNING

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            self._before_compiled(*inputs)
        else:
            self._before_forward(*inputs)
        return self.module(*inputs, **named)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_compiled(self, *inputs: Any) -> None:
        self._before_forward(*inputs)
        self.synchronize()  # what is compiled reads its parameters unseen

    def _before_forward(self, *inputs: Any) -> None:
        self._raise_if_failed()
        if not torch.is_grad_enabled() or self._is_finished:
            return
        if self._saver is not None and self._saver.is_waiting:
            self.synchronize()
            self._saver.take()
        first = inputs[0] if inputs else None
        self._driver.samples = first.shape[0] if isinstance(first, Tensor) and first.dim() else None
        self._driver.begin()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here add up their gradients in this process only, as with DDP."""
        before, self._driver.syncing = self._driver.syncing, False
        try:
            yield
        finally:
            self._driver.syncing = before

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """An iteration that is abandoned where it stands once its version is over, instead of being finished in vain.

        `with model.iteration():` around forward, backward and step. What follows the abandoned line in it is skipped.
        """
        self._driver.listen(True)
        try:
            yield
        except IterationOver:
            pass
        finally:
            self._driver.listen(False)
        given_up = self._driver.give_up()
        if given_up is not None:
            self.receipt = given_up
            self._saved_up_to(given_up)

    def _step(self) -> Receipt:
        self._raise_if_failed()
        self.receipt = self._driver.step()
        self._saved_up_to(self.receipt)
        if self._overlap:
            self._guard.settle()
        else:
            self.synchronize()
        return self.receipt

    def _saved_up_to(self, receipt: Receipt) -> None:
        if self._saver is not None and not receipt.over and self._saver.is_due(receipt.version):
            self._saver.reached(receipt.version, self._extra(receipt.version))

    def _extra(self, version: int) -> dict[str, Any]:
        """What else a checkpoint needs to go on."""
        if self._sampler is None:
            return {}
        extra = {"sampler": self._sampler.state()}
        ledger = self._control.ledger_after(version) if self._decides else None
        return extra if ledger is None else {**extra, "ledger": ledger}

    def synchronize(self) -> None:
        """Wait until every update that the next iteration reads is applied; then all parameters may be read."""
        self._plane.synchronize()

    def digest(self) -> str:
        """The fingerprint of this process's parameters and buffers."""
        self.synchronize()
        return digest({name: tensor.detach().cpu() for name, tensor in self.module.state_dict().items()})

    def check_identical(self) -> str:
        """Compare parameters and buffers between all processes, which all call this at the same version."""
        self.synchronize()
        return check_same_values(self.processes, self.module.state_dict().items(), self.version)

    def record(self, **measures: float) -> None:
        """Put measures of the newest version, such as a loss or an accuracy, into the trace."""
        if self._decides or self._is_traced:
            values = {name: float(value) for name, value in measures.items()}
            self._send("record", version=self.version, measures=values)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)  # without reading a parameter, which would wait for its update

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        """Bring no more gradients; returns when all processes do so, with the same parameters everywhere."""
        if self._is_finished:
            return
        self._raise_if_failed()
        try:
            self._driver.finish()
            if self._saver is not None:
                self._saver.save(self.version, self._extra(self.version))
                self._saver.close()
        finally:
            self._let_go()
        self._control.close()

    def abort(self) -> None:
        """End without the others, which are told."""
        if not self._is_finished:
            self._plane.fail(QuorateError("the model was aborted"))
            self._let_go()
            self._control.close()

    def wait_for_threads(self, limit_s: float) -> bool:
        """Wait for the threads that move and apply gradients; gives whether they have ended."""
        return self._plane.wait_for_threads(limit_s)

    def _let_go(self) -> None:
        self._is_finished = True
        self._at_exit.cancel()
        self._takeover.give_back()
        self._driver.close()
        self._guard.remove()

    # ------------------------------------------------------------ control messages

    def _send(self, kind: str, **fields: Any) -> None:
        self._control.send(kind, **fields)

    def _heard(self, message: dict[str, Any]) -> None:
        if message["kind"] == "digest":
            self._checker.heard(message)
        if self._sampler is not None:
            self._sampler.heard(message)
        self._driver.heard(message)

    def _failed(self, error: QuorateError) -> None:
        self._error = error
        self._plane.fail(error)
        if self._sampler is not None:
            self._sampler.failed(error)

    def _raise_if_failed(self) -> None:
        if self._plane.error is not None:
            raise self._plane.error


def _check_parameters(named: Sequence[tuple[str, Tensor]], optimizer: Optimizer) -> None:
    if not named:
        raise BadInput("the module has no parameter that needs a gradient; there is nothing to train")
    if not isinstance(optimizer, Optimizer):
        raise BadInput(
            f"optimizer is a {type(optimizer).__name__}; make it before: "
            f"DataParallel(module, torch.optim.SGD(module.parameters(), …), policy)"
        )
    inside = getattr(optimizer, "optimizer", None)
    if isinstance(inside, Optimizer):
        raise BadInput(
            f"optimizer is a {type(optimizer).__name__} around a {type(inside).__name__}; "
            f"give DataParallel the one that is inside, and wrap it afterwards"
        )
    check_makes_one_gradient_a_step(optimizer)
    ours = {id(parameter) for _, parameter in named}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in ours and parameter.requires_grad:
                raise BadInput(
                    "the optimizer has a parameter that is not the module's; "
                    "make it of the parameters of the module that DataParallel gets"
                )
