"""Two small nets for 3×32×32 images that load a network as AlexNet and GoogLeNet do.

A net whose dense layers hold nearly all parameters has much to send and little to compute meanwhile; one whose
parameters are spread over many convolutions sends as it computes. Methods that hide communication meet both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quorate.errors import BadInput, check_at_least

#: Channels at width 1: the stem, then block by block the branches (1×1, before 3×3, 3×3, before 5×5, 5×5, after pool).
_STEM = 40
_BLOCKS: tuple[tuple[tuple[int, int, int, int, int, int], ...], ...] = (
    ((32, 32, 48, 8, 16, 16), (40, 40, 64, 12, 24, 24)),  # 16×16
    ((64, 64, 112, 20, 48, 48), (80, 72, 128, 20, 48, 48), (96, 80, 144, 24, 56, 56)),  # 8×8
    ((112, 96, 176, 28, 64, 64), (128, 104, 192, 32, 72, 72), (144, 112, 208, 32, 80, 80)),  # 4×4
)


def alexnet(classes: int = 10, width: float = 1.0, dense: int = 768, dropout: float = 0.0) -> nn.Module:
    """Five convolutions with few parameters, then two heavy dense layers: 2.1M parameters, 86 % of them dense.

    classes: how many scores come out.
    width: multiplies the channels of the convolutions.
    dense: units of each of the two dense layers, which set the number of parameters.
    dropout: chance of a unit of the dense layers to be left out in training (0: the net draws no random numbers).
    """
    _check(classes, width)
    check_at_least("dense", dense, 1)
    if not 0.0 <= dropout < 1.0:
        raise BadInput(f"dropout is {dropout}, but a chance to be left out is at least 0 and below 1")
    first, second = _scaled(48, width), _scaled(96, width)
    drop = (nn.Dropout(dropout),) if dropout else ()
    net = nn.Sequential(
        nn.Conv2d(3, first, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(second, second, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(second, second, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(second, second, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * 4 * 4, dense),
        nn.ReLU(),
        *drop,
        nn.Linear(dense, dense),
        nn.ReLU(),
        *drop,
        nn.Linear(dense, classes),
    )
    return _start_values(net)


def googlenet(classes: int = 10, width: float = 1.0, batch_norm: bool = False) -> nn.Module:
    """A stem, eight inception blocks and a mean over the picture: 1.7M parameters in 50 layers, none heavy.

    classes: how many scores come out.
    width: multiplies all channels; parameters grow with its square.
    batch_norm: BatchNorm after every convolution. Without it no buffers have to be kept alike on all workers.
    """
    _check(classes, width)
    channels = _scaled(_STEM, width)
    layers: list[nn.Module] = [*_convolution(3, channels, 3, batch_norm)]
    for stage in _BLOCKS:
        layers.append(nn.MaxPool2d(2))
        for branches in stage:
            block = Inception(channels, [_scaled(count, width) for count in branches], batch_norm)
            layers.append(block)
            channels = block.channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return _start_values(nn.Sequential(*layers))


class Inception(nn.Module):
    """Four looks at the same picture side by side: 1×1, 3×3, 5×5 and a maximum over 3×3 (Szegedy et al. 2015).

    branches: channels of 1×1, before 3×3, 3×3, before 5×5, 5×5, and after the maximum.
    """

    def __init__(self, channels: int, branches: list[int], batch_norm: bool = False) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = branches
        #: Channels that come out.
        self.channels = one + three + five + pooled
        self.one = nn.Sequential(*_convolution(channels, one, 1, batch_norm))
        self.three = nn.Sequential(
            *_convolution(channels, before_three, 1, batch_norm), *_convolution(before_three, three, 3, batch_norm)
        )
        self.five = nn.Sequential(
            *_convolution(channels, before_five, 1, batch_norm), *_convolution(before_five, five, 5, batch_norm)
        )
        self.pooled = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), *_convolution(channels, pooled, 1, batch_norm)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Pictures [n, channels, h, w] to [n, self.channels, h, w]."""
        return torch.cat([self.one(images), self.three(images), self.five(images), self.pooled(images)], 1)


def _convolution(channels: int, out: int, size: int, batch_norm: bool) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, out, size, padding=size // 2, bias=not batch_norm)
    return [convolution, *([nn.BatchNorm2d(out)] if batch_norm else []), nn.ReLU()]


def _start_values(net: nn.Module) -> nn.Module:
    """Weights as deep as these nets need them to learn at once (He et al. 2015); torch's own are smaller by √6."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    last = [layer for layer in net.modules() if isinstance(layer, nn.Linear)][-1]
    nn.init.normal_(last.weight, std=0.01)  # so the first scores say nothing, and the first loss is ln(classes)
    return net


def _scaled(count: int, width: float) -> int:
    return max(1, round(count * width))


def _check(classes: int, width: float) -> None:
    check_at_least("classes", classes, 2)
    if not 0.0 < width < float("inf"):
        raise BadInput(f"width is {width}, but it multiplies the channels; give a number above 0")
