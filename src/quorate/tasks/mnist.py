"""MNIST, 28×28 grey pictures of handwritten digits, with the small net of Chen et al. (2016).

Data: Y. LeCun, C. Cortes and C. Burges, The MNIST Database of Handwritten Digits, 1998 (CC BY-SA 3.0): 60,000 pictures
to train with, 10,000 for the test. They are read in their original form: packed IDX files, a header and then bytes.
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

from quorate.errors import BadInput, check_at_least, unknown_name
from quorate.task import Task
from quorate.tasks.files import SingleFiles, files_of
from quorate.tasks.images import accuracy_and_loss, turned_and_zoomed
from quorate.tasks.weight_norm import WeightNormConv2d, WeightNormLinear

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
#: Of the training pictures, in 0..1.
MEAN, DEVIATION = 0.1307, 0.3081

PRECISIONS = ("float32", "tf32")
CHANNELS = (32, 64, 64, 128)


def load_mnist(data: str | Path | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test data: pictures as bytes [n, 1, 28, 28], and labels [n].

    data: the folder that has `mnist/*.gz`, or the files themselves (None: the variable QUORATE_DATA, then the user's
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
    """The bytes of a packed IDX file, in the shape that its header gives."""
    try:
        content = bytearray(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{str(file)!r} cannot be unpacked ({error}); remove it, and get it again") from error
    # Two zeros, 8 for unsigned bytes, the number of dimensions; then each of these in four bytes, highest first.
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise BadInput(f"{str(file)!r} is no IDX file of bytes")
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[place : place + 4], "big") for place in range(4, start, 4)]
    if len(content) - start != math.prod(shape) or not math.prod(shape):
        raise BadInput(f"{str(file)!r} has {len(content) - start} bytes after its header, which promises {shape}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def small_net(channels: tuple[int, ...] = CHANNELS) -> nn.Module:
    """The paper's: four layers of 3×3 filters, each with max-pool and weight norm; then scores of ten digits.

    The paper does not say how many filters; 131,000 parameters here.
    """
    layers: list[nn.Module] = []
    before = 1
    for count in channels:  # 28×28 pixels become 14, 7, 3 and 1
        layers += [WeightNormConv2d(before, count, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        before = count
    size = 28 // 2 ** len(channels)
    last = WeightNormLinear(before * size * size, 10)
    with torch.no_grad():
        last.length.mul_(0.3)  # so the first scores say little
    return nn.Sequential(*layers, nn.Flatten(), last)


class Mnist(Task):
    """A small convolutional net with weight norm on MNIST; test accuracy, test loss and test error are its measures.

    data: the folder of data (None: the variable QUORATE_DATA, then the user's cache; fetched where it is missing), or
        the training and the test data themselves, as `load_mnist` gives them.
    lr: the learning rate of SGD at the start.
    updates: the length of the training; over the last `anneal_share` of it the learning rate falls to nothing in a
        straight line. None: it stays as it is.
    augment: turn and zoom the training pictures a little.
    held_out: so many of the training pictures, the last ones, are not trained with but measured with, in place of
        the test data: to choose learning rates by.
    precision: "float32" or "tf32": what a GPU computes products in (None: as torch is set).
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
        if precision not in (None, *PRECISIONS):
            raise unknown_name("precision", str(precision), PRECISIONS)
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
        self.augment, self.channels, self.precision = augment, channels, precision

    def model(self) -> nn.Module:
        if self.precision is not None:
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        return small_net(self.channels)

    def train_data(self) -> TensorDataset:
        return self._train

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        if self.augment and model.training:
            images = turned_and_zoomed(images)
        return functional.cross_entropy(model(_scaled(images)), labels)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.share_of_lr)

    def share_of_lr(self, version: int) -> float:
        """What the learning rate of the next update is multiplied with, after so many."""
        if self.updates is None:
            return 1.0
        return min(1.0, max(0.0, (self.updates - version) / (self.updates * self.anneal_share)))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        images, labels = (tensor.to(device) for tensor in self._test.tensors)
        measures = accuracy_and_loss(lambda some: model(_scaled(some)), images, labels)
        return {**measures, "error": 1.0 - measures["accuracy"]}


def _scaled(images: Tensor) -> Tensor:
    """Bytes as floats with mean 0 and deviation 1. With plain numbers, so that nothing has to go to the device."""
    return (images.float() / 255.0 - MEAN) / DEVIATION
