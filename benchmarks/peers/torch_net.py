"""The net, the loss and a worker's batches for the contenders that compute with torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.problem import Array, Setting, Share, first_weights


def net() -> nn.Sequential:
    """The net with the weights that everybody starts from."""
    torch.set_num_threads(1)
    layers: list[nn.Module] = []
    weights = first_weights()
    for weight, bias in zip(weights[::2], weights[1::2], strict=True):
        layer = nn.Linear(*weight.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight.T))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def weights_of(model: nn.Module) -> list[Array]:
    """As `first_weights` gives them."""
    return [parameter.detach().numpy().T.copy() for parameter in model.parameters()]


def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


def sgd(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=setting.rate)


class TorchShare(Share):
    """A worker's batches as tensors."""

    def tensors(self, step: int) -> tuple[Tensor, Tensor]:
        images, labels = self.batch(step)
        return torch.from_numpy(images), torch.from_numpy(labels)

    def next_tensors(self) -> tuple[Tensor, Tensor]:
        """Sleep as long as the next step asks for; then its batch."""
        self.next()
        return self.tensors(self.step - 1)


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> list[np.ndarray]:
    model.zero_grad()
    loss(model, images, labels).backward()
    return [parameter.grad.numpy() for parameter in model.parameters() if parameter.grad is not None]
