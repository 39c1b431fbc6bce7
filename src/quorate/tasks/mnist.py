"""MNIST, 28×28 grey pictures of handwritten digits, with the small net of Chen et al. (2016).

The net uses weight norm, implemented here: a model with torch's parametrization cannot be sent to another process.

Data: Y. LeCun, C. Cortes and C. Burges, The MNIST Database of Handwritten Digits, 1998 (CC BY-SA 3.0): 60,000 training
and 10,000 test pictures. The original form is read: compressed IDX files, a header and then bytes.
"""

from __future__ import annotations

import gzip
import math
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from quorate.errors import BadInput, check_at_least
from quorate.tasks.files import SingleFiles, files_of
from quorate.tasks.images import ScheduledTask, accuracy_and_loss, checked_precision, turned_and_zoomed, use_precision

#: Initial length of the directions. A step turns a longer direction by a smaller angle, which lowers the curvature of
#: the loss: at a learning rate of 0.1 the net tolerates a staleness of 10 with length 4, but not with length 1.
START = 4.0


class _WeightNorm(nn.Module):
    """direction: [out, …], of any length but 0. length: [out, 1, …], initially 1. bias: [out]."""

    def __init__(self, out: int, *rest: int) -> None:
        super().__init__()
        drawn = functional.normalize(torch.randn(out, math.prod(rest)))
        self.direction = nn.Parameter(START * drawn.view(out, *rest))
        self.length = nn.Parameter(torch.ones(out, *(1 for _ in rest)))
        self.bias = nn.Parameter(torch.zeros(out))

    @property
    def weight(self) -> Tensor:
        """length · direction / |direction|, for each filter."""
        return torch._weight_norm(self.direction, self.length, 0)


class WeightNormConv2d(_WeightNorm):
    """`nn.Conv2d` with weight norm."""

    def __init__(self, channels: int, out: int, size: int, padding: int = 0) -> None:
        super().__init__(out, channels, size, size)
        self.padding = padding

    def forward(self, images: Tensor) -> Tensor:
        """Pictures [n, channels, h, w] to [n, out, h', w']."""
        return functional.conv2d(images, self.weight, self.bias, padding=self.padding)


class WeightNormLinear(_WeightNorm):
    """`nn.Linear` with weight norm."""

    def __init__(self, inputs: int, out: int) -> None:
        super().__init__(out, inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """[n, inputs] to [n, out]."""
        return functional.linear(inputs, self.weight, self.bias)


MNIST = SingleFiles(
    name="MNIST",
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    files=(
        "mnist/train-images-idx3-ubyte.gz",
        "mnist/train-labels-idx1-ubyte.gz",
        "mnist/t10k-images-idx3-ubyte.gz",
        "mnist/t10k-labels-idx1-ubyte.gz",
    ),
    md5s=(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    sizes_bytes=(9_912_422, 28_881, 1_648_877, 4_542),
)
#: Of the training pictures, for values in 0..1.
MEAN, DEVIATION = 0.1307, 0.3081

CHANNELS = (32, 64, 64, 128)


def load_mnist(data: str | Path | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test data: pictures as bytes [n, 1, 28, 28], and labels [n].

    data: the folder with `mnist/*.gz`, or with the files themselves (None: the variable QUORATE_DATA, then the user's
        cache).
    """
    return _load(tuple(files_of(MNIST, data)))


@cache
def _load(files: tuple[Path, ...]) -> tuple[TensorDataset, TensorDataset]:
    images, labels, test_images, test_labels = (read_idx(file) for file in files)
    return _paired(images, labels, files[1]), _paired(test_images, test_labels, files[3])


def _paired(images: Tensor, labels: Tensor, file: Path) -> TensorDataset:
    if images.dim() != 3 or labels.shape != images.shape[:1] or int(labels.max()) > 9:
        raise BadInput(f"{str(file)!r} has no label of 0 to 9 for each picture; they are no files of MNIST")
    return TensorDataset(images[:, None], labels.long())


def read_idx(file: Path) -> Tensor:
    """The bytes of a compressed IDX file, in the shape of its header."""
    try:
        content = bytearray(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{str(file)!r} cannot be unpacked ({error}); remove it, and get it again") from error
    # Header: two zeros, 8 for unsigned bytes, the number of dimensions, then each dimension as four bytes, big-endian.
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise BadInput(f"{str(file)!r} is no IDX file of bytes")
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[place : place + 4], "big") for place in range(4, start, 4)]
    if len(content) - start != math.prod(shape) or not math.prod(shape):
        raise BadInput(f"{str(file)!r} has {len(content) - start} bytes after its header, which promises {shape}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def small_net(channels: tuple[int, ...] = CHANNELS) -> nn.Module:
    """The paper's net: four layers of 3×3 filters, each with max-pool and weight norm, then scores of ten digits.

    The paper does not give the number of filters; this net has 131,000 parameters.
    """
    layers: list[nn.Module] = []
    before = 1
    for count in channels:  # 28×28 pixels become 14, 7, 3 and 1
        layers += [WeightNormConv2d(before, count, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        before = count
    size = 28 // 2 ** len(channels)
    last = WeightNormLinear(before * size * size, 10)
    with torch.no_grad():
        last.length.mul_(0.3)  # so that the first scores differ little
    return nn.Sequential(*layers, nn.Flatten(), last)


class Mnist(ScheduledTask):
    """A small convolutional net with weight norm on MNIST, measured by test accuracy, test loss and test error.

    data: the data folder (None: the variable QUORATE_DATA, then the user's cache; downloaded if missing), or the
        training and the test data as `load_mnist` returns them.
    lr: the initial learning rate of SGD.
    updates: the length of the training. Over its last `anneal_share` the learning rate falls linearly to 0; None: it
        is constant.
    augment: rotate and scale the training pictures a little.
    held_out: number of last training pictures that are used for evaluation in place of the test data, to choose
        learning rates.
    precision: "float32" or "tf32", in which a GPU computes products (None: torch's setting).
    """

    batch_size = 64

    def __init__(
        self,
        data: str | Path | tuple[TensorDataset, TensorDataset] | None = None,
        *,
        lr: float = 0.1,
        updates: int | None = None,
        anneal_share: float = 0.4,
        augment: bool = True,
        held_out: int = 0,
        channels: tuple[int, ...] = CHANNELS,
        precision: str | None = None,
    ) -> None:
        self.precision = checked_precision(precision)
        if updates is not None:
            check_at_least("updates", updates, 1)
        if not 0 < anneal_share <= 1:
            raise BadInput(f"anneal_share is {anneal_share}, but a share of the training is above 0 and at most 1")
        check_at_least("held_out", held_out, 0)
        train, test = data if isinstance(data, tuple) else load_mnist(data)
        if held_out >= len(train):
            raise BadInput(f"held_out is {held_out}, but there are only {len(train)} training pictures")
        cut = len(train) - held_out
        self._train = TensorDataset(*(tensor[:cut] for tensor in train.tensors))
        self._test = TensorDataset(*(tensor[cut:] for tensor in train.tensors)) if held_out else test
        self.lr, self.updates, self.anneal_share = lr, updates, anneal_share
        self.augment, self.channels = augment, channels

    def model(self) -> nn.Module:
        use_precision(self.precision)
        return small_net(self.channels)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        if self.augment and model.training:
            images = turned_and_zoomed(images)
        return functional.cross_entropy(model(_scaled(images)), labels)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr)

    def share_of_lr(self, version: int) -> float:
        if self.updates is None:
            return 1.0
        return min(1.0, max(0.0, (self.updates - version) / (self.updates * self.anneal_share)))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        images, labels = (tensor.to(device) for tensor in self._test.tensors)
        measures = accuracy_and_loss(lambda some: model(_scaled(some)), images, labels)
        return {**measures, "error": 1.0 - measures["accuracy"]}


def _scaled(images: Tensor) -> Tensor:
    """Bytes as floats with mean 0 and deviation 1. Plain numbers need no copy to the device."""
    return (images.float() / 255.0 - MEAN) / DEVIATION
