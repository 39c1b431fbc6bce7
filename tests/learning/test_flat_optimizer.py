"""An optimizer on one flat vector makes bitwise the same steps as on the parameters one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quorate.engines.simulated.model import flatten_optimizer, vector_of
from quorate.flat import Flat
from quorate.learner import Learner, Learning
from quorate.task import BoundTask
from tests.toy_tasks import Toy, mlp

Make = Callable[[Any], torch.optim.Optimizer]

BY_ELEMENT: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, eps=1.0),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
}


def _learner(make: Make, clip_norm: float | None = None, model: Callable[[], nn.Module] = mlp) -> Learner:
    return Learner(BoundTask(Toy(model, make)), Learning(clip_norm=clip_norm, ema=0.9), 3, torch.device("cpu"))


def _gradients(learner: Learner, step: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(step)
    return [torch.randn(parameter.shape, generator=draws) for parameter in learner.params]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("name", BY_ELEMENT)
def test_the_steps_are_the_same(name: str, clip_norm: float | None) -> None:
    plain, gathered, given = (_learner(BY_ELEMENT[name], clip_norm) for _ in range(3))
    vectors = [flatten_optimizer(one) for one in (gathered, given)]
    for step in range(4):
        for learner in (plain, gathered):
            for parameter, gradient in zip(learner.params, _gradients(learner, step), strict=True):
                parameter.grad = gradient
            learner.step()
        flat = Flat.copy_of(_gradients(given, step), torch.device("cpu"))
        assert vectors[1] is not None
        vectors[1].gradient = vector_of(flat)
        given.step(None, (vector_of(flat),))
    for learner in (gathered, given):
        for mine, theirs in ((learner.flat, plain.flat), (learner.average, plain.average)):
            assert mine is not None and theirs is not None
            for one, other in zip(mine.views, theirs.views, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def _by_tensor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params)


def _two_groups(params: Any) -> torch.optim.Optimizer:
    first, *rest = params
    return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01)


def _hooked(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("make", [_by_tensor, _two_groups, _hooked])
def test_an_optimizer_that_could_see_the_difference_keeps_its_parameters(make: Make) -> None:
    learner = _learner(make)
    assert flatten_optimizer(learner) is None
    assert learner.before_step is None


def test_parameters_of_two_types_are_no_vector() -> None:
    learner = _learner(BY_ELEMENT["sgd"], model=lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3).double()))
    assert flatten_optimizer(learner) is None
