"""An Inception net for CIFAR-10, trained as Chen et al. (2016) train Inception on ImageNet.

The blocks are those of Inception v3 (Szegedy et al. 2016), fewer and narrower, for pictures of 32×32: 5×5 as two 3×3,
then 7×7 as 1×7 and 7×1, then 3×3 as 1×3 beside 3×1, with BatchNorm after every convolution. The optimizer is RMSProp
with momentum; the learning rate falls exponentially with the epochs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quorate.errors import BadInput, check_at_least
from quorate.tasks.cifar10 import Cifar10, Data, check_net, scaled_channels

Size = int | tuple[int, int]


class Branches(nn.Module):
    """Parallel branches with the same input; their output channels are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, images: Tensor) -> Tensor:
        """Pictures [n, channels, h, w]; all branches return pictures of one size."""
        return torch.cat([branch(images) for branch in self.branches], 1)


def inception(classes: int = 10, width: float = 1.0) -> nn.Module:
    """A stem and five blocks, two of which halve the picture: 0.55M parameters in 36 convolutions.

    classes: number of scores.
    width: multiplies all channels.
    """
    check_net(classes, width)

    def w(count: int) -> int:
        return scaled_channels(count, width)

    net = nn.Sequential(
        _convolution(3, w(32), 3),
        _convolution(w(32), w(48), 3),
        nn.MaxPool2d(2),  # 16×16
        _small(w(48), w(24), w(16)),
        _smaller(4 * w(24), w(64), w(32)),  # 8×8
        _wide(4 * w(24) + w(64) + w(32), w(48), w(32)),
        _smaller(4 * w(48), w(80), w(48)),  # 4×4
        _split(4 * w(48) + w(80) + w(48), w(64), w(64)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6 * w(64), classes),
    )
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    last = net[-1]
    assert isinstance(last, nn.Linear)
    nn.init.normal_(last.weight, std=0.01)  # so that the first scores are nearly equal
    nn.init.zeros_(last.bias)
    return net


def _small(channels: int, out: int, within: int) -> nn.Module:
    """Branches 1×1, 3×3, two 3×3 and an average, `out` channels each."""
    return Branches(
        _convolution(channels, out, 1),
        _chain(channels, (within, 1), (out, 3)),
        _chain(channels, (within, 1), (out, 3), (out, 3)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _convolution(channels, out, 1)),
    )


def _wide(channels: int, out: int, within: int) -> nn.Module:
    """Branches 1×1, 1×7 with 7×1, that pair twice, and an average, `out` channels each."""
    return Branches(
        _convolution(channels, out, 1),
        _chain(channels, (within, 1), (within, (1, 7)), (out, (7, 1))),
        _chain(channels, (within, 1), (within, (7, 1)), (within, (1, 7)), (within, (7, 1)), (out, (1, 7))),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _convolution(channels, out, 1)),
    )


def _split(channels: int, out: int, within: int) -> nn.Module:
    """Branches 1×1, 1×3 beside 3×1, the same after a 3×3, and an average: six times `out` channels."""
    return Branches(
        _convolution(channels, out, 1),
        _chain(channels, (within, 1)).append(_cross(within, out)),
        _chain(channels, (within, 1), (within, 3)).append(_cross(within, out)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _convolution(channels, out, 1)),
    )


def _cross(channels: int, out: int) -> nn.Module:
    return Branches(_convolution(channels, out, (1, 3)), _convolution(channels, out, (3, 1)))


def _smaller(channels: int, three: int, twice: int) -> nn.Module:
    """Halves height and width: branches 3×3, two 3×3, and a maximum."""
    return Branches(
        _convolution(channels, three, 3, stride=2),
        _chain(channels, (twice, 1), (twice, 3)).append(_convolution(twice, twice, 3, stride=2)),
        nn.MaxPool2d(3, 2, 1),
    )


def _chain(channels: int, *layers: tuple[int, Size]) -> nn.Sequential:
    """Convolutions one after the other; a layer is its output channels and its size."""
    inputs = [channels, *(out for out, _ in layers)]
    return nn.Sequential(
        *(_convolution(before, out, size) for before, (out, size) in zip(inputs, layers, strict=False))
    )


def _convolution(channels: int, out: int, size: Size, stride: int = 1) -> nn.Sequential:
    padding = size // 2 if isinstance(size, int) else (size[0] // 2, size[1] // 2)
    return nn.Sequential(
        nn.Conv2d(channels, out, size, stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
    )


class Cifar10Inception(Cifar10):
    """The Inception net on CIFAR-10, measured by test accuracy and test loss.

    data, augment, precision, train_samples, test_samples: as in `Cifar10`.
    lr: the initial learning rate.
    decay: factor of the learning rate per epoch; the paper's 0.94 every two epochs is 0.97 here.
    samples_per_update: samples in an update (a worker's batch times the quorum), needed to count epochs; None: the
        learning rate is constant.
    epsilon: of RMSProp. Its other constants are those of the paper.
    width: multiplies the net's channels.
    """

    batch_size = 32

    def __init__(
        self,
        data: Data = None,
        *,
        lr: float = 0.045,
        decay: float = 0.97,
        samples_per_update: int | None = None,
        epsilon: float = 1.0,
        width: float = 1.0,
        augment: bool = True,
        precision: str | None = None,
        train_samples: int | None = None,
        test_samples: int | None = None,
    ) -> None:
        super().__init__(
            data=data,
            lr=lr,
            augment=augment,
            precision=precision,
            train_samples=train_samples,
            test_samples=test_samples,
        )
        if not 0 < decay <= 1:
            raise BadInput(f"decay is {decay}, but a learning rate that falls is multiplied with 0 to 1")
        if samples_per_update is not None:
            check_at_least("samples_per_update", samples_per_update, 1)
        self.decay, self.samples_per_update, self.epsilon, self.width = decay, samples_per_update, epsilon, width

    def model(self) -> nn.Module:
        super().model()  # sets the precision
        return inception(width=self.width)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(params, lr=self.lr, alpha=0.9, momentum=0.9, eps=self.epsilon)

    def share_of_lr(self, version: int) -> float:
        if self.samples_per_update is None:
            return 1.0
        return float(self.decay ** (version * self.samples_per_update / len(self.train_data())))
