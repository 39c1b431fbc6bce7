"""A worker's gradient has the bits that autograd gives, although big linear layers write theirs themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from quorate.engines.shared import compute
from quorate.engines.shared.buffers import Buffers
from quorate.engines.shared.compute import Cancelled, Computer, TensorPlace
from quorate.engines.shared.shared_memory import BlockLayout, Blocks, anonymous_file
from quorate.task import BoundTask
from tests.toy_tasks import Toy, batch_norm_net

draws = torch.Generator().manual_seed(3)
X, T = torch.randn(37, 50, generator=draws), torch.randn(37, 50, generator=draws)
CPU = torch.device("cpu")
Loss = Callable[[nn.Module], Tensor]


@pytest.fixture(autouse=True)
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers too, so that the nets can be small."""
    monkeypatch.setattr(compute, "WORTH_IT_ELEMENTS", 1)


def net(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(50, 50, bias=bias), nn.Tanh(), nn.Linear(50, 50))


class Case(Toy):
    def __init__(self, make: Callable[[], nn.Module], loss: Loss) -> None:
        super().__init__(make)
        self.of_model = loss

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return self.of_model(model)


class IsolatedComputer:
    """A worker's computer, alone with two blocks: one for the version, one for the gradient."""

    def __init__(self, task: Any, check: Callable[[], None] = lambda: None, wire: str = "fp32") -> None:
        bound = BoundTask(task)
        model = bound.model(0, CPU)
        self.layout = BlockLayout(model, wire)
        self.descriptor = anonymous_file("test")
        self.blocks = Blocks(self.descriptor, self.layout.nbytes)
        self.version, self.gradient = self.blocks.add(), self.blocks.add()
        self.computer = Computer(
            bound,
            seed=0,
            device=CPU,
            wire=wire,
            look_through=True,
            check=check,
        )
        block = self.blocks.block(self.version)
        params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for view, parameter in zip(self.layout.params.views(self.layout.params_of(block)), params, strict=True):
            view.copy_(parameter.detach())
        buffers = Buffers(model).newest()
        for view, buffer in zip(self.layout.buffers.views(self.layout.buffers_of(block)), buffers, strict=True):
            view.copy_(buffer)
        self.read = TensorPlace([(self.layout, block)], gradient=False)
        self.computer.look_at(self.read, 0)

    def compute(self, batch: Any = None) -> list[Tensor | None]:
        block = self.blocks.block(self.gradient)
        block.fill_(255)  # what is not written shows
        place = TensorPlace([(self.layout, block)], gradient=True)
        self.computed = self.computer.compute(batch, place, lambda: None)
        views = [view.clone() for view in self.layout.gradient.views(self.layout.gradient_of(block))]
        there = self.layout.mask_of(block).tolist() if self.computed.some_missing else [1] * len(views)
        return [view if present else None for view, present in zip(views, there, strict=True)]


@contextmanager
def isolated_computer(task: Any, **options: Any) -> Iterator[IsolatedComputer]:
    made = IsolatedComputer(task, **options)
    try:
        yield made
    finally:
        made.blocks.forget()
        os.close(made.descriptor)


def computed(task: Any, **options: Any) -> list[Tensor | None]:
    """The gradient that a worker computes, twice."""
    with isolated_computer(task, **options) as one:
        first, second = one.compute(), one.compute()
        at_rest = one.computer.model.training and all(parameter.grad is None for parameter in one.computer.params)
    assert same(first, second) and at_rest
    return first


def outcome(task: Any) -> list[Tensor | None] | str:
    """The same, or the error in words. (An error that is kept would keep the blocks.)"""
    try:
        return computed(task)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def plain(task: Any, batch: Any = None) -> list[Tensor | None]:
    """What autograd gives."""
    model = BoundTask(task).model(0, CPU)
    model.train()
    task.loss(model, batch).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def mse(output: Tensor) -> Tensor:
    return functional.mse_loss(output, T)


def frozen() -> nn.Module:
    model = net()
    model[0].weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = net()
    model[2].weight = model[0].weight
    return model


def two_norms() -> nn.Module:
    model = net()
    return nn.utils.parametrizations.weight_norm(model[0]) and model


def gradient_penalty(model: nn.Module, times: int = 1) -> Tensor:
    x = X.clone().requires_grad_()
    output = x
    for _ in range(times):
        output = model(output)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return mse(output) + slope.square().mean()


def weight_penalty(model: nn.Module, again: bool = False) -> Tensor:
    loss = mse(model(X))
    (slope,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
    return (mse(model(X)) if again else loss) + slope.square().mean()


def partly_without_gradient(model: nn.Module) -> Tensor:
    with torch.no_grad():
        first = model(X)
    return mse(model(first))


def with_inner_backward(model: nn.Module) -> Tensor:
    mse(model(X)).mul(0.5).backward()
    return mse(model(X))


def in_half(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return mse(model(X).float())


def outside(model: nn.Module) -> Tensor:
    return functional.linear(X, model[0].weight).square().mean()


def turned(model: nn.Module) -> Tensor:
    """The second layer's input lies in memory column by column."""
    hidden = model[0](X).t().contiguous().t()
    return mse(model[2](hidden))


FINE: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "used once": (net, lambda m: mse(m(X))),
    "without bias": (lambda: net(bias=False), lambda m: mse(m(X))),
    "used twice": (net, lambda m: mse(m(m(X)))),
    "used three times": (net, lambda m: mse(m(m(m(X))))),
    "also used outside": (net, lambda m: mse(m(X)) + outside(m)),
    "also used outside, twice": (net, lambda m: mse(m(X)) + outside(m) + m[0].weight.square().sum()),
    "three dimensions": (net, lambda m: mse(m(X.view(1, 37, 50)).view(37, 50))),
    "three dimensions, then two": (net, lambda m: mse(m(m(X.view(1, 37, 50)).view(37, 50)))),
    "one dimension": (net, lambda m: functional.mse_loss(m(X[0]), T[0])),
    "one sample": (net, lambda m: functional.mse_loss(m(X[:1]), T[:1])),
    "no sample": (net, lambda m: m(X[:0]).sum()),
    "a sum, whose gradient is one number": (net, lambda m: m(X).sum()),
    "one sample many times": (net, lambda m: mse(m(X[:1].expand(37, 50)))),
    "every other sample": (net, lambda m: functional.mse_loss(m(X[::2]), T[::2])),
    "an input that lies column by column": (net, lambda m: mse(m(X.t().contiguous().t()))),
    "frozen": (frozen, lambda m: mse(m(X))),
    "tied": (tied, lambda m: mse(m(X))),
    "a layer that is not used": (net, lambda m: mse(m[0](X))),
    "weight norm": (two_norms, lambda m: mse(m(X))),
    "partly under no_grad": (net, partly_without_gradient),
    "gradient penalty": (net, gradient_penalty),
    "penalty on the weight's gradient": (net, weight_penalty),
    "a backward inside the loss": (net, with_inner_backward),
    "autocast": (net, in_half),
    "double precision": (lambda: net().double(), lambda m: functional.mse_loss(m(X.double()), T.double())),
    "recomputed": (net, lambda m: mse(checkpoint(m, X, use_reentrant=False))),
    "recomputed, reentrant": (net, lambda m: mse(checkpoint(m, X.clone().requires_grad_(), use_reentrant=True))),
    "the model's own weights, functionally": (
        net,
        lambda m: mse(torch.func.functional_call(m, dict(m.named_parameters()), (X,))),
    ),
    "each sample by itself": (net, lambda m: mse(torch.vmap(m)(X))),
    "used twice, and outside": (net, lambda m: mse(m(m(X))) + outside(m)),
    "used twice, and decayed": (net, lambda m: mse(m(m(X))) + m[0].weight.square().sum()),
    "three dimensions, two, three": (
        net,
        lambda m: mse(m(m(m(X.view(1, 37, 50)).view(37, 50)).view(1, 37, 50)).view(37, 50)),
    ),
    "a hidden layer that lies column by column": (net, turned),
}


@pytest.mark.parametrize("name", FINE)
def test_the_same_bits_as_autograd(name: str) -> None:
    task = Case(*FINE[name])
    assert same(computed(task), plain(task))


def test_the_layers_do_write_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above compare is not autograd with itself."""
    calls = []
    put = compute.DirectLinears.put
    monkeypatch.setattr(compute.DirectLinears, "put", lambda self, *rest: calls.append(rest[0]) or put(self, *rest))
    with isolated_computer(Case(net, lambda m: mse(m(X)))) as one:
        one.compute()
        assert sorted(calls) == [0, 2] and one.computer._direct.written == {0, 2}


def test_several_uses_are_left_to_autograd() -> None:
    with isolated_computer(Case(*FINE["used twice"])) as one:
        one.compute()
        assert one.computer._direct.written == set()


# ------------------------------------------------------------ other bits than autograd's

OTHER_BITS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "gradient penalty, used twice": (net, lambda m: gradient_penalty(m, 2)),
    "penalty on the weight's gradient, used twice": (net, lambda m: weight_penalty(m, again=True)),
}


@pytest.mark.parametrize("name", OTHER_BITS)
@pytest.mark.xfail(strict=True, reason="not the bits of autograd, so not those of a replay")
def test_the_same_bits_as_autograd_also_here(name: str) -> None:
    task = Case(*OTHER_BITS[name])
    assert same(computed(task), plain(task))


@pytest.mark.parametrize("name", OTHER_BITS)
def test_nearly_the_same_as_autograd(name: str) -> None:
    task = Case(*OTHER_BITS[name])
    for here, there in zip(computed(task), plain(task), strict=True):
        assert here is not None and there is not None
        torch.testing.assert_close(here, there)


# ------------------------------------------------------------ other gradients than autograd's


def scaled_weights(model: nn.Module) -> Tensor:
    """As in weight noise, pruning masks, MAML: the layer computes with another tensor than its parameter."""
    weights = {name: parameter * 2 for name, parameter in model.named_parameters()}
    return mse(torch.func.functional_call(model, weights, (X,)))


def forward_replaced() -> nn.Module:
    model = net()
    layer: Any = model[0]
    layer.forward = lambda x: functional.linear(x, layer.weight * 2, layer.bias)
    return model


def hooked_when_accumulated() -> nn.Module:
    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    model = net()
    model[0].weight.register_post_accumulate_grad_hook(double)
    return model


class HookedInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hooked = nn.Linear(50, 50), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.hooked = True
            self.layer.weight.register_hook(lambda grad: grad * 2)
        result: Tensor = self.layer(x)
        return result


ALSO_RIGHT: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "functional_call with other weights": (net, scaled_weights),
    "a hook after accumulation": (hooked_when_accumulated, lambda m: mse(m(X))),
    "the input by its name": (net, lambda m: mse(m[0](input=X))),
    "a layer whose forward was replaced": (forward_replaced, lambda m: mse(m(X))),
    "a hook registered in forward": (HookedInForward, lambda m: mse(m(X))),
    "torch.func.grad": (net, lambda m: mse(m(X)) + torch.func.grad(lambda x: m(x).square().sum())(X).square().mean()),
    "torch.func.jvp": (net, lambda m: torch.func.jvp(lambda x: mse(m(x)), (X,), (X,))[1]),
    "vmap over batches": (net, lambda m: mse(torch.vmap(m)(X.view(1, 37, 50))[0])),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, when it first makes a jvp
@pytest.mark.parametrize("name", ALSO_RIGHT)
def test_the_right_gradient(name: str) -> None:
    """Where a layer is not used as it was made."""
    task = Case(*ALSO_RIGHT[name])
    found = outcome(task)
    assert not isinstance(found, str), found
    assert same(found, plain(task))


# ------------------------------------------------------------ looking whether the work is wanted


@pytest.mark.parametrize("make", [net, batch_norm_net])
def test_looking_between_layers_changes_no_bit(monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module]) -> None:
    monkeypatch.setattr(compute, "LOOK_AFTER_S", 0.0)
    looked: list[int] = []
    task = Toy(make) if make is batch_norm_net else Case(make, lambda m: mse(m(X)))
    batch = list(zip(*[task.data[index] for index in range(8)], strict=True))
    batch = [torch.stack(column) for column in batch]
    with isolated_computer(task, check=lambda: looked.append(0)) as one:
        first = one.compute(batch)
        before = len(looked)
        one.computer.look_at(one.read, 0)
        assert same(one.compute(batch), first) and same(first, plain(task, batch))
        layers = sum(next(module.children(), None) is None for module in one.computer.model.modules())
        assert len(looked) - before >= 2 * layers - 1


@pytest.mark.parametrize("stop_at", range(8))
def test_work_that_is_abandoned_anywhere_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, stop_at: int) -> None:
    """Cancelled at any look, the next gradient is as if nothing had been."""
    monkeypatch.setattr(compute, "LOOK_AFTER_S", 0.0)
    looks = [0]

    def check() -> None:
        looks[0] += 1
        if looks[0] == stop_at + 1:
            raise Cancelled

    task = Case(net, lambda m: mse(m(X)))
    with isolated_computer(task, check=lambda: check()) as one:
        looks[0] = -1000
        expected = one.compute()
        looks[0] = 0
        with pytest.raises(Cancelled):
            one.compute()
        assert one.computer._direct._views is None and all(p.grad is None for p in one.computer.params)
        assert same(one.compute(), expected)


def test_a_gradient_on_a_half_wire_is_rounded_once() -> None:
    task = Case(net, lambda m: mse(m(X)))
    expected = [None if grad is None else grad.bfloat16() for grad in plain(task)]
    assert same(computed(task, wire="bf16"), expected)
