"""Gradients that are promised until their round is over, and parameters that wait to be read."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quorate.data_parallel.lazy_tensors import Gate, Guard, PendingGradient, plain

# ------------------------------------------------------------ promised gradients


class _Promise:
    def __init__(self, *values: float) -> None:
        self.average, self.asked = torch.tensor(values), 0
        self.gradient = PendingGradient(self.average, self._settle)

    def _settle(self) -> Tensor:
        self.asked += 1
        return self.average


def test_a_promise_waits_only_when_it_is_read() -> None:
    promise = _Promise(3.0, 4.0)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = promise.gradient
    assert parameter.grad.shape == (2,) and parameter.grad.dtype == torch.float32 and parameter.grad is not None
    parameter.grad = None
    assert promise.asked == 0
    assert promise.gradient.norm().item() == 5.0
    assert promise.asked > 0


@pytest.mark.parametrize(
    "read",
    [
        lambda g: (g * 2 / 2).tolist(),
        lambda g: g.tolist(),
        lambda g: g.numpy().tolist(),
        lambda g: g.detach().clone().tolist(),
        lambda g: torch.stack([g, g])[0].tolist(),
        lambda g: copy.deepcopy(g).tolist(),
        lambda g: pickle.loads(pickle.dumps(g)).tolist(),
        lambda g: [g[0].item(), float(g[1])],
        lambda g: torch.zeros(2).add_(g).tolist(),
        lambda g: g.to(torch.float64).tolist(),
        lambda g: g.cpu().tolist(),
        lambda g: torch._foreach_mul([g], 1.0)[0].tolist(),
        lambda g: plain(g).tolist(),
        lambda g: list(map(float, __import__("numpy").asarray(g))),
    ],
)
def test_every_way_to_read_a_promise_gives_the_average(read: Callable[[Any], list[float]]) -> None:
    assert read(_Promise(3.0, 4.0).gradient) == [3.0, 4.0]


def test_clipping_unscaling_and_accumulating_change_the_average_itself() -> None:
    promise, other = _Promise(3.0, 4.0), _Promise(0.0, 12.0)
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = promise.gradient, other.gradient
    assert nn.utils.clip_grad_norm_(parameters, 1.3).item() == pytest.approx(13.0)
    torch.testing.assert_close(promise.average, torch.tensor([0.3, 0.4]))
    nn.utils.clip_grad_value_(parameters, 0.35)
    torch.testing.assert_close(promise.average, torch.tensor([0.3, 0.35]))
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    torch.testing.assert_close(promise.average, torch.tensor([0.6, 0.7]))
    parameters[0].grad += torch.ones(2)
    torch.testing.assert_close(promise.average, torch.tensor([1.6, 1.7]))
    parameters[0].grad.zero_()
    assert promise.average.tolist() == [0.0, 0.0]


def test_backward_adds_to_a_promise_that_was_not_cleared() -> None:
    promise = _Promise(3.0, 4.0)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = promise.gradient
    (parameter * torch.tensor([1.0, 2.0])).sum().backward()
    assert plain(parameter.grad).tolist() == [4.0, 6.0]


# ------------------------------------------------------------ guarded reads


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.norm(self.first(x)))
        return out


class _Reads:
    """A module behind a gate; each tensor is its own bucket, and what is waited for is written down."""

    def __init__(self) -> None:
        self.module = _Tied()
        self.waited: list[str] = []
        self.gate = Gate(self._wait)
        self._names = [name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())]
        for number, (_, tensor) in enumerate((*self.module.named_parameters(), *self.module.named_buffers())):
            self.gate.know(tensor, number)
        self.guard = Guard(self.module, self.gate)
        self.gate.closed = True

    def _wait(self, numbers: Iterable[int]) -> None:
        self.waited += [self._names[number] for number in numbers]


def test_reading_waits_for_what_is_read_and_nothing_else() -> None:
    reads = _Reads()
    _ = reads.module.first.bias
    assert reads.waited == ["first.bias"]
    reads.waited.clear()
    _ = reads.module.second.weight  # another layer's
    assert reads.waited == ["first.weight"]
    reads.waited.clear()
    _ = reads.module.norm.running_mean
    assert reads.waited == ["norm.running_mean"]
    reads.waited.clear()
    reads.gate.closed = False
    reads.module(torch.zeros(2, 3))
    assert reads.waited == []


def test_a_forward_waits_layer_by_layer_in_its_order() -> None:
    reads = _Reads()
    reads.module(torch.zeros(2, 3))
    waited = list(dict.fromkeys(reads.waited))
    assert set(waited[:2]) == {"first.weight", "first.bias"}
    assert waited[-1] == "second.bias"
    assert set(waited[2:-1]) == {
        f"norm.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }


@pytest.mark.parametrize(
    "read",
    [
        lambda module: module.state_dict(),
        lambda module: [*module.named_parameters(), *module.named_buffers()],
        lambda module: [*module.parameters(), *module.buffers()],
        lambda module: copy.deepcopy(module),
        lambda module: pickle.dumps(module),
    ],
)
def test_whatever_reads_everything_waits_for_everything(read: Callable[[nn.Module], Any]) -> None:
    reads = _Reads()
    read(reads.module)
    assert set(reads.waited) == set(reads._names)


def test_copies_are_free_and_the_guard_can_be_taken_off() -> None:
    reads = _Reads()
    for one in (copy.deepcopy(reads.module), pickle.loads(pickle.dumps(reads.module))):
        reads.waited.clear()
        one(torch.zeros(2, 3))
        assert reads.waited == []
        assert one.first.weight is one.second.weight  # tied, still
        assert type(one.first._parameters) is dict
    reads.guard.remove()
    reads.module(torch.zeros(2, 3))
    assert reads.waited == []
    assert type(reads.module.norm._buffers) is dict and type(reads.module.first._parameters) is dict


def test_a_recurrent_module_waits_before_its_forward() -> None:
    module = nn.LSTM(2, 3)
    waited: list[int] = []
    gate = Gate(waited.extend)
    for number, one in enumerate(module.parameters()):
        gate.know(one, number)
    guard = Guard(module, gate)
    gate.closed = True
    module(torch.zeros(1, 1, 2))
    assert {0, 1, 2, 3} <= set(waited)
    guard.remove()
