"""Where a training loop is listened to: gradients becoming ready, DDP's waits, the optimizer's step.

A process's own time in a step runs from the end of the last wait for the others to its own last gradient. Hooks on
parameters fire as autograd finishes each gradient, before DDP waits for its all-reduce at the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quorate.measuring.clocks import Clock, Spans

# Every parameter is listened to in the first steps, and once in a while later, since layers may be frozen and thawed;
# in between only those that were ever the last. A hook costs a microsecond or two, and a large model has hundreds.
_LEARNING_STEPS = 5
_LEARN_AGAIN_EVERY = 256

# Not in torch's stubs. FSDP waits for its own communication in the same way.
_at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class StepHooks:
    """Hooks on one model and on all optimizers, which tell a clock the spans of each step."""

    def __init__(self, model: nn.Module, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._wrappers = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
        self._ours: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()  # does it step the model's parameters?
        self._leader: Optimizer | None = None  # the one that made the last step
        self._in_step: dict[Optimizer, Any] = {}  # inside a step that began without gradients -> its hook
        self._steps = 0
        self._learn_until = _LEARNING_STEPS
        self._listen_next = 1  # after so many steps other parameters are listened to
        self._ever_last: set[int | None] = set()  # places in model.parameters()
        self._last: int | None = None  # of the gradients since the last step
        self._spans: Spans = []
        self._start: Any = None  # of the span that is open
        self._end: Any = None  # the last gradient so far of the span that is open
        self._waiting = False  # a callback at the end of this backward is set
        self._pauses = 0  # that are open; inside them nothing is listened to
        self._other_hooks: list[Any] = []
        self._parameter_hooks: list[Any] = []

    def attach(self) -> None:
        self._other_hooks = [register_optimizer_step_pre_hook(self._before_optimizer)]
        for wrapper in self._wrappers:
            # Before each forward DDP sends process 0's buffers (BatchNorm) to all, and so all wait for process 0.
            if wrapper.broadcast_buffers and any(True for _ in wrapper.module.buffers()):
                self._other_hooks.append(wrapper.register_forward_pre_hook(self._before_broadcast))
                self._other_hooks.append(wrapper.module.register_forward_pre_hook(self._after_broadcast))
        self._listen_to_all()
        self._start = self._clock.now()

    def detach(self) -> None:
        for handle in (*self._other_hooks, *self._parameter_hooks, *self._in_step.values()):
            handle.remove()
        self._other_hooks, self._parameter_hooks = [], []
        self._in_step.clear()

    # ------------------------------------------------------------ gradients

    def _listen_to_all(self) -> None:
        self._listen(range(len(list(self._model.parameters()))))

    def _listen(self, places: Container[int | None]) -> None:
        for handle in self._parameter_hooks:
            handle.remove()
        self._parameter_hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(place))  # type: ignore[no-untyped-call]
            for place, parameter in enumerate(self._model.parameters())
            if place in places and _can_be_heard(parameter)
        ]

    def _hook(self, place: int) -> Callable[[Any], None]:
        now, forget, wrappers = self._clock.now, self._clock.forget, self._wrappers

        def gradient_is_ready(_parameter: Any) -> None:
            if self._pauses:
                return
            if forget is not None and self._end is not None:
                forget(self._end)
            self._end = now()
            self._last = place
            if wrappers and not self._waiting and _averages(wrappers):
                self._waiting = True
                _at_end_of_backward(self._backward_is_over)

        return gradient_is_ready

    def _backward_is_over(self) -> None:
        # DDP's own wait may be queued behind this; what is queued now comes after it.
        _at_end_of_backward(self._wait_is_over)

    def _wait_is_over(self) -> None:
        self._waiting = False
        self._close_span()

    def _close_span(self) -> None:
        """What lies between the last gradient and now was waiting."""
        if self._end is not None:
            self._spans.append((self._start, self._end))
            self._start, self._end = self._clock.now(), None

    # ------------------------------------------------------------ waits before forward, and pauses

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_broadcast(self, wrapper: Any, _inputs: Any) -> None:
        if wrapper.require_forward_param_sync and not self._pauses:
            self._stop()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_broadcast(self, _module: Any, _inputs: Any) -> None:
        if not self._pauses:
            self._go_on()

    def pause(self) -> None:
        self._stop()
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            self._go_on()

    def _stop(self) -> None:
        """Up to now it was the process's own work: had it waited since the last gradient, the span were closed."""
        if self._start is not None:
            self._spans.append((self._start, self._clock.now()))
            self._start = self._end = None

    def _go_on(self) -> None:
        if self._start is None:
            self._start = self._clock.now()

    # ------------------------------------------------------------ steps

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._pauses or (optimizer is not self._leader and not self._steps_our_parameters(optimizer)):
            return
        if self._last is not None:
            self._step_is_over(optimizer)
        elif optimizer not in self._in_step:
            self._in_step[optimizer] = optimizer.register_step_post_hook(self._after_optimizer)

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self._in_step.pop(optimizer).remove()
        if self._last is not None:  # a closure (LBFGS) computes its gradients inside the optimizer's step
            self._step_is_over(optimizer)
        elif self._leader in (None, optimizer):  # otherwise it is the second optimizer of one step
            self._step_was_missed()

    def _steps_our_parameters(self, optimizer: Optimizer) -> bool:
        known = self._ours.get(optimizer)
        if known is None:
            ours = {id(parameter) for parameter in self._model.parameters()}
            known = any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])
            self._ours[optimizer] = known
        return known

    def _step_is_over(self, optimizer: Optimizer) -> None:
        """Gradients are there: what they took is a step."""
        self._leader = optimizer
        self._waiting = False  # a backward that failed left it set
        if self._spans:
            self._close_span()
            self._clock.add(self._spans)
            self._spans = []
        else:
            self._clock.add_one(self._start, self._end)
            self._start, self._end = self._clock.now(), None
        self._steps += 1
        if self._last not in self._ever_last:
            self._ever_last.add(self._last)
        self._last = None
        if self._steps == self._listen_next:
            self._listen_anew()

    def _listen_anew(self) -> None:
        if self._steps == self._learn_until:
            self._listen(self._ever_last)
            self._learn_until += _LEARN_AGAIN_EVERY
            self._listen_next = self._learn_until - 1
        else:
            self._listen_to_all()  # again after the first step, since lazy parameters exist then
            self._listen_next = self._learn_until

    def _step_was_missed(self) -> None:
        """None of the parameters listened to got a gradient: the step is left out, and all are listened to again."""
        self._clock.add([])
        self._spans, self._start = [], self._clock.now()
        self._steps += 1
        self._learn_until = self._listen_next = self._steps + _LEARNING_STEPS
        self._listen_to_all()


def _averages(wrappers: list[DistributedDataParallel]) -> bool:
    """Whether the backward pass under way ends with an all-reduce: not inside `no_sync`."""
    return wrappers[0].require_backward_grad_sync or any(one.require_backward_grad_sync for one in wrappers)


def _can_be_heard(parameter: Any) -> bool:
    """Not while it is frozen, nor while a lazy layer has not given it a shape."""
    return bool(not is_lazy(parameter) and parameter.requires_grad and parameter.is_leaf)
