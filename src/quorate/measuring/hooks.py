"""Clocks and hooks in a training loop: forward passes, finished gradients, DDP's waits, the optimizer's step.

A process's own time in a step runs from the end of the last wait for other processes to its own last gradient. Hooks on
parameters fire as autograd finishes each gradient, before DDP waits for its all-reduce at the end of backward. After
that wait come the optimizer, the loading of data, the forward and the backward pass.

A step is a list of marks. A mark is a moment and the activity of the process before it. The type of a moment depends on
the clock: the host's clock, or the events of a GPU, which runs behind the host.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Container, Iterator
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_READ_FROM = 32  # unread steps before the first is read; by then its events are usually over

#: Activities of a process before a mark. UNKNOWN counts as its own time; PAUSED time is in no column.
DATA, FORWARD, BACKWARD, OPTIMIZER, WAITING, UNKNOWN, PAUSED = range(7)
#: Values of a step: its own seconds, then the seconds of its phases and of waiting.
COLUMNS = ("seconds", "data", "forward", "backward", "optimizer", "waiting")
WIDTH = len(COLUMNS)

Marks = list[tuple[Any, int]]
_MISSING = (math.nan,) * WIDTH


def _row(spent: list[float]) -> tuple[float, ...]:
    """The columns of a step, from the seconds of each activity."""
    own = spent[DATA] + spent[FORWARD] + spent[BACKWARD] + spent[OPTIMIZER]
    if spent[UNKNOWN]:
        return (own + spent[UNKNOWN], math.nan, math.nan, math.nan, math.nan, spent[WAITING])
    return (own, spent[DATA], spent[FORWARD], spent[BACKWARD], spent[OPTIMIZER], spent[WAITING])


class HostClock:
    """The clock of the process, for devices on which a call returns when its work is done.

    now: the current moment, without a wrapper, since steps may be short.
    forget: takes back a moment that is no longer needed; None: the clock does not reuse moments.
    """

    forget: None = None

    def __init__(self) -> None:
        self._rows = array("d")
        self.now: Callable[[], float] = perf_counter

    def add(self, start: Any, marks: Marks) -> None:
        """Add a step; the next step starts at its last mark. Without marks the step could not be measured."""
        spent = [0.0] * 7
        for moment, kind in marks:
            spent[kind] += moment - start
            start = moment
        self._rows.extend(_row(spent) if marks else _MISSING)

    def finish(self) -> array[float]:
        """`COLUMNS` of all steps in one array; NaN for steps that could not be measured."""
        return self._rows


class CudaClock:
    """Events on the GPU's stream. They are read some steps later, so that no step waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = array("d")
        self._unread: deque[tuple[Any, Marks]] = deque()
        self._free: list[Any] = []  # events for reuse
        self.now: Callable[[], Any] = self._record
        self.forget: Callable[[Any], None] = self._free.append

    def _record(self) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return None  # during the capture of a graph no step runs, and timed events would break the capture
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def add(self, start: Any, marks: Marks) -> None:
        self._unread.append((start, marks))
        while len(self._unread) > _READ_FROM and all(one.query() for one in _events(*self._unread[0])):
            self._read()

    def finish(self) -> array[float]:
        while self._unread:
            for event in _events(*self._unread[0]):
                event.synchronize()
            self._read()
        return self._rows

    def _read(self) -> None:
        start, marks = self._unread.popleft()
        events = _events(start, marks)
        if not marks or len(events) <= len(marks):
            self._rows.extend(_MISSING)
        else:
            spent = [0.0] * 7
            for before, (moment, kind) in zip(events, marks, strict=False):
                spent[kind] += before.elapsed_time(moment) / 1e3
            self._rows.extend(_row(spent))
        self._free.extend(events[:-1])  # the last event is the start of the next step


def _events(start: Any, marks: Marks) -> list[Any]:
    """All recorded events of a step. All must be over before reading, since they may be on different streams."""
    return [event for event in (start, *(moment for moment, _ in marks)) if event is not None]


Clock = HostClock | CudaClock


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


# ---------------------------------------------------------------- hooks


# A hook costs a microsecond or two, and a large model has hundreds of parameters. So every parameter has a hook only in
# the first steps, and from time to time later, since layers may be frozen and unfrozen. In all other steps only the
# parameters have one whose gradient was ever the last of a step.
_LEARNING_STEPS = 5
_LEARN_AGAIN_EVERY = 256

# Not in torch's stubs. FSDP waits for its own communication in the same way.
_at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class StepHooks:
    """Hooks on one model and on all optimizers, which pass the marks of each step to a clock."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._wrappers = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
        self._ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()  # whether it steps model parameters
        self._leader: Optimizer | None = None  # the optimizer that made the last step
        self._stepping: Optimizer | None = None  # the optimizer that is inside its step
        self._in_step: dict[Optimizer, Any] = {}  # optimizer whose step began without gradients -> its post hook
        self._steps = 0
        self._learn_until = _LEARNING_STEPS
        self._change_at = 1  # the step after which the hooked parameters change
        self._ever_last: set[int | None] = set()  # indices in model.parameters()
        self._last: int | None = None  # parameter of the last gradient since the last step
        self._start: Any = None  # moment at which the step began
        self._marks: Marks = []
        self._phase = DATA  # current activity
        self._end: Any = None  # moment of the last gradient so far, not yet a mark
        self._waiting = False  # whether a callback at the end of this backward pass is queued
        self._broadcasts = False  # whether DDP broadcasts buffers before this forward pass
        self._pauses = 0  # open pauses, during which the hooks do nothing
        self._other_hooks: list[Any] = []
        self._parameter_hooks: list[Any] = []

    def attach(self) -> None:
        self._other_hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._optimizer_is_done),
        ]
        for module in _called(self._model):
            self._other_hooks.append(module.register_forward_pre_hook(self._forward_begins))
            self._other_hooks.append(module.register_forward_hook(self._forward_ends))
        for wrapper in self._wrappers:
            # Before each forward pass DDP broadcasts process 0's buffers (BatchNorm), so all wait for process 0.
            if wrapper.broadcast_buffers and any(True for _ in wrapper.module.buffers()):
                self._other_hooks.append(wrapper.register_forward_pre_hook(self._before_broadcast))
                self._other_hooks.append(wrapper.module.register_forward_pre_hook(self._after_broadcast))
        self._hook_all()
        self._start = self._clock.now()

    def detach(self) -> None:
        for handle in (*self._other_hooks, *self._parameter_hooks, *self._in_step.values()):
            handle.remove()
        self._other_hooks, self._parameter_hooks = [], []
        self._in_step.clear()

    # ------------------------------------------------------------ gradients

    def _hook_all(self) -> None:
        self._hook_parameters(range(len(list(self._model.parameters()))))

    def _hook_parameters(self, indices: Container[int | None]) -> None:
        for handle in self._parameter_hooks:
            handle.remove()
        self._parameter_hooks = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._model.parameters())
            if index in indices and _can_have_hook(parameter)
        ]

    def _gradient_hook(self, index: int) -> Callable[[Any], None]:
        now, forget, wrappers = self._clock.now, self._clock.forget, self._wrappers

        def gradient_is_ready(_parameter: Any) -> None:
            if self._pauses:
                return
            if forget is not None and self._end is not None:
                forget(self._end)
            self._end = now()
            self._last = index
            if wrappers and not self._waiting and _averages(wrappers):
                self._waiting = True
                _at_end_of_backward(self._backward_is_over)

        return gradient_is_ready

    def _backward_is_over(self) -> None:
        # DDP's own wait may be queued after this callback; a callback queued now runs after that wait.
        _at_end_of_backward(self._wait_is_over)

    def _wait_is_over(self) -> None:
        self._waiting = False
        self._wait_ends()

    def _wait_ends(self) -> None:
        """The time between the last gradient and now was waiting."""
        if self._end is not None:
            self._backward_ends()
            self._marks.append((self._clock.now(), WAITING))
            self._phase = OPTIMIZER

    def _backward_ends(self) -> None:
        """Backward ended with the last gradient. If no hook saw a forward pass, the activity is unknown."""
        self._marks.append((self._end, BACKWARD if self._phase == BACKWARD else UNKNOWN))
        self._end, self._phase = None, DATA

    # ------------------------------------------------------------ forward, waits before it, and pauses

    # The next two hooks do nothing inside a compiled function; `torch.compiler.disable` would cost microseconds a call.

    def _forward_begins(self, _module: Any, _inputs: Any) -> None:
        if not (torch.compiler.is_compiling() or self._pauses):
            if self._end is not None:
                self._backward_ends()
            self._marks.append((self._clock.now(), DATA))
            self._phase = FORWARD

    def _forward_ends(self, _module: Any, _inputs: Any, _output: Any) -> None:
        if not (torch.compiler.is_compiling() or self._pauses):
            self._marks.append((self._clock.now(), FORWARD))
            self._phase = BACKWARD

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_broadcast(self, wrapper: Any, _inputs: Any) -> None:
        if wrapper.require_forward_param_sync and not self._pauses:
            self._own_until_now()
            self._broadcasts = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_broadcast(self, _module: Any, _inputs: Any) -> None:
        if self._broadcasts and not self._pauses:
            self._marks.append((self._clock.now(), WAITING))
        self._broadcasts = False

    def pause(self) -> None:
        if not self._pauses:
            self._own_until_now()
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            self._marks.append((self._clock.now(), PAUSED))

    def _own_until_now(self) -> None:
        """The time until now was the process's own work. A wait since the last gradient would already be a mark."""
        if self._end is not None:
            self._backward_ends()
        self._marks.append((self._clock.now(), self._phase))

    # ------------------------------------------------------------ steps

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._pauses or (optimizer is not self._leader and not self._steps_our_parameters(optimizer)):
            return
        if optimizer is self._stepping:
            return  # a user's optimizer class calls the step of torch's class, and both have hooks
        self._stepping = optimizer
        if self._last is not None:
            self._step_is_over(optimizer)
        elif optimizer not in self._in_step:
            self._in_step[optimizer] = optimizer.register_step_post_hook(self._after_optimizer)

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self._in_step.pop(optimizer).remove()
        if self._last is not None:  # a closure (LBFGS) computes its gradients inside the optimizer's step
            self._step_is_over(optimizer)
        elif self._leader in (None, optimizer):  # any other optimizer is the second one of the same step
            self._step_was_missed()

    def _optimizer_is_done(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._pauses and (optimizer is self._leader or self._steps_our_parameters(optimizer)):
            self._marks.append((self._clock.now(), OPTIMIZER))
            self._phase, self._stepping = DATA, None

    def _steps_our_parameters(self, optimizer: Optimizer) -> bool:
        known = self._ours.get(optimizer)
        if known is None:
            ours = {id(parameter) for parameter in self._model.parameters()}
            known = any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
            self._ours[optimizer] = known
        return known

    def _step_is_over(self, optimizer: Optimizer) -> None:
        """End the step, whose gradients have been computed."""
        self._leader = optimizer
        self._waiting = False  # may still be set after a failed backward pass
        self._wait_ends()
        self._clock.add(self._start, self._marks)
        self._start, self._marks = self._marks[-1][0], []
        self._steps += 1
        self._ever_last.add(self._last)
        self._last = None
        if self._steps == self._change_at:
            self._change_hooks()

    def _change_hooks(self) -> None:
        if self._steps == self._learn_until:
            self._hook_parameters(self._ever_last)
            self._learn_until += _LEARN_AGAIN_EVERY
            self._change_at = self._learn_until - 1
        else:
            self._hook_all()  # also after the first step, when lazy parameters have their shape
            self._change_at = self._learn_until

    def _step_was_missed(self) -> None:
        """No parameter with a hook got a gradient: leave out the step, and give all parameters hooks again."""
        self._clock.add(None, [])
        self._start, self._marks, self._phase = self._clock.now(), [], OPTIMIZER
        self._steps += 1
        self._learn_until = self._change_at = self._steps + _LEARNING_STEPS
        self._hook_all()


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that a training loop calls: the model, or the members of a list or dict, which has no forward."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        for module in model.children():
            yield from _called(module)
    else:
        yield model


def _averages(wrappers: list[DistributedDataParallel]) -> bool:
    """Whether the current backward pass ends with an all-reduce. Inside `no_sync` it does not."""
    return wrappers[0].require_backward_grad_sync or any(one.require_backward_grad_sync for one in wrappers)


def _can_have_hook(parameter: Any) -> bool:
    """A frozen parameter cannot, nor one of a lazy layer that has no shape yet."""
    return bool(not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf)
