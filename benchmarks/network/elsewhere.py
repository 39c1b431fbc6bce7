"""Nets that are computed elsewhere: a layer takes its time without taking the CPU, as where an accelerator computes it.

Hosts here share the machine's cores, so communication takes CPU from computation, and so does whatever else runs. These
stand-ins have the parameters of a real net, layer by layer in the order in which it uses them, and sleep as long as
each layer's share of the multiplications says; gradients are zeros. Communication and the optimizer stay on the CPU.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch
from torch import Tensor, nn

FORWARD_S = 0.070
BACKWARD_S = 0.140  # two products for each of forward's
_PR_SET_TIMERSLACK = 29


def computed_elsewhere(net: nn.Module, sample: Tensor, forward_s: float = FORWARD_S) -> nn.Module:
    """The stand-in of a net, from one real pass of a sample through it; backward takes twice as long as forward."""
    layers = used_layers(net, sample)
    total = sum(products for _, products in layers)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)  # nanoseconds: the kernel's 50 µs would add up over the layers
    stand_ins = [StandIn(layer, forward_s * products / total) for layer, products in layers]
    return nn.Sequential(_Scores(), *stand_ins)


def used_layers(net: nn.Module, sample: Tensor) -> list[tuple[nn.Module, int]]:
    """The layers that have parameters, in the order of use, each with its multiplications for the sample."""
    found: list[tuple[nn.Module, int]] = []

    def note(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        weight = layer.get_parameter("weight")
        places = output.numel() // output.shape[1]  # each weight is multiplied at every place of every picture
        found.append((layer, places * weight.numel()))

    with_parameters = [layer for layer in net.modules() if next(layer.parameters(recurse=False), None) is not None]
    handles = [layer.register_forward_hook(note) for layer in with_parameters]
    with torch.no_grad():
        net(sample)
    for handle in handles:
        handle.remove()
    return found


class _Scores(nn.Module):
    """Something of the right shape to go through the stand-ins: scores [batch, 10] out of pictures."""

    def forward(self, pictures: Tensor) -> Tensor:
        return pictures.flatten(1)[:, :10]


class StandIn(nn.Module):
    """A layer's parameters, and its time."""

    def __init__(self, layer: nn.Module, forward_s: float) -> None:
        super().__init__()
        self._seconds = forward_s, forward_s * BACKWARD_S / FORWARD_S
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, nn.Parameter(parameter.detach().clone()))

    def forward(self, scores: Tensor) -> Tensor:
        passed: Tensor = _Sleep.apply(scores, self._seconds, *self.parameters())  # type: ignore[no-untyped-call]
        return passed


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, seconds: tuple[float, float], *parameters: Tensor) -> Tensor:
        ctx.backward_s, ctx.shapes = seconds[1], [parameter.shape for parameter in parameters]
        time.sleep(seconds[0])
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return gradients[0], None, *(torch.zeros(shape) for shape in ctx.shapes)
