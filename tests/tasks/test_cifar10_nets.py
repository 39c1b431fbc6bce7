"""The two nets have the shapes that their names promise to a network."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import quorate
from quorate.tasks.cifar10 import alexnet, googlenet


def parameters_of(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def dense_parameters_of(net: nn.Module) -> int:
    return sum(parameters_of(layer) for layer in net.modules() if isinstance(layer, nn.Linear))


def test_alexnet_is_mostly_dense_layers() -> None:
    net = alexnet()
    assert 1.5e6 <= parameters_of(net) <= 3e6
    assert dense_parameters_of(net) > 0.8 * parameters_of(net)


def test_googlenet_has_no_heavy_layer() -> None:
    net = googlenet()
    assert 1.5e6 <= parameters_of(net) <= 3e6
    assert max(parameter.numel() for parameter in net.parameters()) < 0.15 * parameters_of(net)
    assert dense_parameters_of(net) < 0.01 * parameters_of(net)


@pytest.mark.parametrize("make", [alexnet, googlenet])
def test_scores_of_any_number_of_classes_and_gradients_everywhere(make) -> None:
    torch.manual_seed(0)
    net = make(classes=7, width=0.5)
    scores = net(torch.randn(4, 3, 32, 32))
    assert scores.shape == (4, 7)
    nn.functional.cross_entropy(scores, torch.tensor([0, 1, 2, 3])).backward()
    assert all(bool(parameter.grad.abs().sum() > 0) for name, parameter in net.named_parameters() if "weight" in name)


@pytest.mark.parametrize("make", [alexnet, googlenet])
def test_the_first_loss_says_that_nothing_is_known(make) -> None:
    torch.manual_seed(1)
    scores = make()(torch.randn(16, 3, 32, 32))
    loss = nn.functional.cross_entropy(scores, torch.arange(16) % 10)
    assert abs(loss.item() - math.log(10)) < 0.6


@pytest.mark.parametrize("make", [alexnet, googlenet])
def test_by_default_a_net_draws_no_random_numbers_and_has_no_buffers(make) -> None:
    torch.manual_seed(2)
    net = make(width=0.25).train()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(net(images), net(images))
    assert not list(net.buffers())


def test_width_and_dense_set_the_size() -> None:
    sizes = [parameters_of(googlenet(width=width)) for width in (0.25, 0.5, 1.0, 2.0)]
    assert all(3.0 < larger / smaller < 4.5 for smaller, larger in pairwise(sizes))
    assert parameters_of(alexnet(dense=2048)) > 3 * parameters_of(alexnet())


def test_batch_norm_and_dropout_are_there_when_asked_for() -> None:
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in googlenet(batch_norm=True, width=0.25).modules())
    assert any(isinstance(layer, nn.Dropout) for layer in alexnet(dropout=0.5, width=0.25).modules())


@pytest.mark.parametrize(
    ("make", "options", "sentence"),
    [
        (alexnet, {"classes": 1}, "classes is 1, but it must be at least 2"),
        (googlenet, {"width": 0.0}, "width is 0.0, but it multiplies the channels"),
        (alexnet, {"width": float("nan")}, "width is nan"),
        (alexnet, {"dense": 0}, "dense is 0, but it must be at least 1"),
        (alexnet, {"dropout": 1.0}, "dropout is 1.0, but a chance"),
    ],
)
def test_bad_input(make, options, sentence) -> None:
    with pytest.raises(quorate.BadInput, match=sentence):
        make(**options)
