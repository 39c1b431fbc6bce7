"""CIFAR-10, 32×32 colour pictures of ten classes: an Inception net, and two nets that differ in what they send.

In `alexnet` dense layers hold nearly all parameters: it sends much and has little computation to overlap. In
`googlenet` the parameters are spread over many convolutions, so it can send while it computes. A method that hides
communication has to handle both.

Data: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009: 50,000 training and 10,000 test
pictures. The original binary form is read: a byte for the label, then the red, green and blue planes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from quorate.errors import BadInput, check_at_least, unknown_name
from quorate.tasks.files import Archive, files_of
from quorate.tasks.images import (
    RiseAndCosine,
    ScheduledTask,
    accuracy_and_loss,
    checked_precision,
    first_samples,
    shifted_and_flipped,
    standardised,
    use_precision,
)

#: Channels at width 1: the stem, then the branches of each block (1×1, before 3×3, 3×3, before 5×5, 5×5, after pool).
_STEM = 40
_BLOCKS: tuple[tuple[tuple[int, int, int, int, int, int], ...], ...] = (
    ((32, 32, 48, 8, 16, 16), (40, 40, 64, 12, 24, 24)),  # 16×16
    ((64, 64, 112, 20, 48, 48), (80, 72, 128, 20, 48, 48), (96, 80, 144, 24, 56, 56)),  # 8×8
    ((112, 96, 176, 28, 64, 64), (128, 104, 192, 32, 72, 72), (144, 112, 208, 32, 80, 80)),  # 4×4
)


def alexnet(classes: int = 10, width: float = 1.0, dense: int = 768, dropout: float = 0.0) -> nn.Module:
    """Five convolutions with few parameters, then two large dense layers: 2.1M parameters, 86 % of them dense.

    classes: number of scores.
    width: multiplies the channels of the convolutions.
    dense: units of each of the two dense layers, which set the number of parameters.
    dropout: probability of dropping a unit of the dense layers (0: the net draws no random numbers).
    """
    check_net(classes, width)
    check_at_least("dense", dense, 1)
    if not 0.0 <= dropout < 1.0:
        raise BadInput(f"dropout is {dropout}, but a chance to be left out is at least 0 and below 1")
    first, second = scaled_channels(48, width), scaled_channels(96, width)
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
    """A stem, eight inception blocks and a mean over the picture: 1.7M parameters in 50 layers of moderate size.

    classes: number of scores.
    width: multiplies all channels; parameters grow with its square.
    batch_norm: BatchNorm after every convolution. Without it no buffers have to be synchronised between workers.
    """
    check_net(classes, width)
    channels = scaled_channels(_STEM, width)
    layers: list[nn.Module] = [*_convolution(3, channels, 3, batch_norm)]
    for stage in _BLOCKS:
        layers.append(nn.MaxPool2d(2))
        for branches in stage:
            block = Inception(channels, [scaled_channels(count, width) for count in branches], batch_norm)
            layers.append(block)
            channels = block.channels
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return _start_values(nn.Sequential(*layers))


class Inception(nn.Module):
    """Four parallel branches: 1×1, 3×3, 5×5 and a maximum over 3×3 (Szegedy et al. 2015).

    branches: channels of 1×1, before 3×3, 3×3, before 5×5, 5×5, and after the maximum.
    """

    def __init__(self, channels: int, branches: list[int], batch_norm: bool = False) -> None:
        super().__init__()
        one, before_three, three, before_five, five, pooled = branches
        self.channels = one + three + five + pooled  # of the output
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
    """Initial weights with which deep nets learn from the start (He et al. 2015); torch's are smaller by √6."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    last = [layer for layer in net.modules() if isinstance(layer, nn.Linear)][-1]
    nn.init.normal_(last.weight, std=0.01)  # so that the first scores are nearly equal and the loss is ln(classes)
    return net


def scaled_channels(count: int, width: float) -> int:
    return max(1, round(count * width))


def check_net(classes: int, width: float) -> None:
    check_at_least("classes", classes, 2)
    if not 0.0 < width < float("inf"):
        raise BadInput(f"width is {width}, but it multiplies the channels; give a number above 0")


_BATCHES = 5
_PICTURES, _PICTURE_BYTES = 10_000, 3 * 32 * 32
CIFAR10 = Archive(
    name="CIFAR-10",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",
    files=(
        *(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, _BATCHES + 1)),
        "cifar-10-batches-bin/test_batch.bin",
    ),
    sizes_bytes=(_PICTURES * (1 + _PICTURE_BYTES),) * (_BATCHES + 1),
)
#: Of each channel of the training pictures, for values in 0..1.
MEANS = (0.4914, 0.4822, 0.4465)
DEVIATIONS = (0.2470, 0.2435, 0.2616)

#: Argument of a task: the data folder, or the training and the test data.
Data = str | Path | tuple[TensorDataset, TensorDataset] | None

PRECISIONS = ("float32", "tf32", "bfloat16")
NETS: dict[str, Callable[[], nn.Module]] = {"alexnet": alexnet, "googlenet": partial(googlenet, batch_norm=True)}


def load_cifar10(data: str | Path | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test data: pictures as bytes [n, 3, 32, 32], and labels [n].

    data: the folder with `cifar-10-batches-bin` (None: the variable QUORATE_DATA, then the user's cache).
    """
    return _load(tuple(files_of(CIFAR10, data)))


@cache
def _load(files: tuple[Path, ...]) -> tuple[TensorDataset, TensorDataset]:
    tables = [read_binary(file) for file in files]
    images, labels = (torch.cat(parts) for parts in zip(*tables[:-1], strict=True))
    return TensorDataset(images, labels), TensorDataset(*tables[-1])


def read_binary(file: Path) -> tuple[Tensor, Tensor]:
    """Pictures [n, 3, 32, 32] as bytes and labels [n] of one original file."""
    content = bytearray(file.read_bytes())
    if not content or len(content) % (1 + _PICTURE_BYTES):
        raise BadInput(f"{str(file)!r} has {len(content)} bytes, which are no whole pictures of {1 + _PICTURE_BYTES}")
    table = torch.frombuffer(content, dtype=torch.uint8).view(-1, 1 + _PICTURE_BYTES)
    labels = table[:, 0].long()
    if int(labels.max()) > 9:
        raise BadInput(f"{str(file)!r} has a label {int(labels.max())}, but there are ten; it is no file of CIFAR-10")
    return table[:, 1:].reshape(-1, 3, 32, 32), labels


class Cifar10(ScheduledTask):
    """One of two nets on CIFAR-10, measured by test accuracy and test loss.

    net: "alexnet" (2.1M parameters, most in dense layers) or "googlenet" (1.7M in 50 layers, with BatchNorm).
    data: the data folder (None: the variable QUORATE_DATA, then the user's cache; downloaded if missing), or the
        training and the test data as `load_cifar10` returns them.
    lr, momentum, weight_decay: of SGD with Nesterov's momentum. `lr` is the peak of the schedule.
    updates: the length of the training. The learning rate rises over its first `warm_up_share` and falls to 0 along a
        cosine; None: it is constant.
    augment: shift and mirror the training pictures.
    precision: "float32", "tf32" or "bfloat16", in which a GPU computes products (None: torch's setting).
    train_samples, test_samples: use only this many first samples, for quick runs.
    """

    batch_size = 64

    def __init__(
        self,
        net: str = "alexnet",
        data: Data = None,
        *,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        updates: int | None = None,
        warm_up_share: float = 0.1,
        augment: bool = True,
        precision: str | None = None,
        train_samples: int | None = None,
        test_samples: int | None = None,
    ) -> None:
        if net not in NETS:
            raise unknown_name("net", net, NETS)
        self.net, self.augment, self.precision = net, augment, checked_precision(precision, PRECISIONS)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._rise_and_fall = RiseAndCosine(updates, warm_up_share)
        train, test = data if isinstance(data, tuple) else load_cifar10(data)
        self._train = first_samples(train, train_samples, "train_samples")
        self._test = first_samples(test, test_samples, "test_samples")

    def model(self) -> nn.Module:
        use_precision(self.precision)
        return NETS[self.net]()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        if self.augment and model.training:
            images = shifted_and_flipped(images)
        return functional.cross_entropy(self._scores(model, images).float(), labels)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.momentum > 0
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        images, labels = (tensor.to(device) for tensor in self._test.tensors)
        return accuracy_and_loss(partial(self._scores, model), images, labels)

    def _scores(self, model: nn.Module, images: Tensor) -> Tensor:
        inputs = standardised(images, MEANS, DEVIATIONS)
        if images.is_cuda:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16, enabled=images.is_cuda and self.precision == "bfloat16"):
            scores: Tensor = model(inputs)
            return scores


# ---------------------------------------------------------------- the Inception net

# Trained as Chen et al. (2016) train Inception on ImageNet: RMSProp with momentum, a learning rate that falls
# exponentially with the epochs. The blocks are those of Inception v3 (Szegedy et al. 2016), fewer and narrower, for
# pictures of 32×32: 5×5 as two 3×3, then 7×7 as 1×7 and 7×1, then 3×3 as 1×3 beside 3×1, with BatchNorm everywhere.


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
        _normed_convolution(3, w(32), 3),
        _normed_convolution(w(32), w(48), 3),
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
        _normed_convolution(channels, out, 1),
        _chain(channels, (within, 1), (out, 3)),
        _chain(channels, (within, 1), (out, 3), (out, 3)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _normed_convolution(channels, out, 1)),
    )


def _wide(channels: int, out: int, within: int) -> nn.Module:
    """Branches 1×1, 1×7 with 7×1, that pair twice, and an average, `out` channels each."""
    return Branches(
        _normed_convolution(channels, out, 1),
        _chain(channels, (within, 1), (within, (1, 7)), (out, (7, 1))),
        _chain(channels, (within, 1), (within, (7, 1)), (within, (1, 7)), (within, (7, 1)), (out, (1, 7))),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _normed_convolution(channels, out, 1)),
    )


def _split(channels: int, out: int, within: int) -> nn.Module:
    """Branches 1×1, 1×3 beside 3×1, the same after a 3×3, and an average: six times `out` channels."""
    return Branches(
        _normed_convolution(channels, out, 1),
        _chain(channels, (within, 1)).append(_cross(within, out)),
        _chain(channels, (within, 1), (within, 3)).append(_cross(within, out)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), _normed_convolution(channels, out, 1)),
    )


def _cross(channels: int, out: int) -> nn.Module:
    return Branches(_normed_convolution(channels, out, (1, 3)), _normed_convolution(channels, out, (3, 1)))


def _smaller(channels: int, three: int, twice: int) -> nn.Module:
    """Halves height and width: branches 3×3, two 3×3, and a maximum."""
    return Branches(
        _normed_convolution(channels, three, 3, stride=2),
        _chain(channels, (twice, 1), (twice, 3)).append(_normed_convolution(twice, twice, 3, stride=2)),
        nn.MaxPool2d(3, 2, 1),
    )


def _chain(channels: int, *layers: tuple[int, Size]) -> nn.Sequential:
    """Convolutions one after the other; a layer is its output channels and its size."""
    inputs = [channels, *(out for out, _ in layers)]
    return nn.Sequential(
        *(_normed_convolution(before, out, size) for before, (out, size) in zip(inputs, layers, strict=False))
    )


def _normed_convolution(channels: int, out: int, size: Size, stride: int = 1) -> nn.Sequential:
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
