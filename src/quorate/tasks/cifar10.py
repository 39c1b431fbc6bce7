"""CIFAR-10, 32×32 colour pictures of ten kinds, with two nets that load a network differently.

Data: A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009: 50,000 pictures to train with, 10,000
for the test. It is read in its original binary form: a byte for the label, then the planes red, green and blue.
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
from quorate.task import Task
from quorate.tasks.files import Archive, files_of
from quorate.tasks.images import accuracy_and_loss, shifted_and_flipped, standardised
from quorate.tasks.nets import alexnet, googlenet
from quorate.tasks.schedules import RiseAndCosine

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
#: Of the training pictures, channel by channel, in 0..1.
MEANS = (0.4914, 0.4822, 0.4465)
DEVIATIONS = (0.2470, 0.2435, 0.2616)

#: What a task is told of its data.
Data = str | Path | tuple[TensorDataset, TensorDataset] | None

PRECISIONS = ("float32", "tf32", "bfloat16")
NETS: dict[str, Callable[[], nn.Module]] = {"alexnet": alexnet, "googlenet": partial(googlenet, batch_norm=True)}


def load_cifar10(data: str | Path | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test data: pictures as bytes [n, 3, 32, 32], and labels [n].

    data: the folder that has `cifar-10-batches-bin` (None: the variable QUORATE_DATA, then the user's cache).
    """
    return _load(tuple(files_of(CIFAR10, data)))


@cache
def _load(files: tuple[Path, ...]) -> tuple[TensorDataset, TensorDataset]:
    tables = [read_binary(file) for file in files]
    images, labels = (torch.cat(parts) for parts in zip(*tables[:-1], strict=True))
    return TensorDataset(images, labels), TensorDataset(*tables[-1])


def read_binary(file: Path) -> tuple[Tensor, Tensor]:
    """Pictures [n, 3, 32, 32] in bytes and labels [n] of one file in the original form."""
    content = bytearray(file.read_bytes())
    if not content or len(content) % (1 + _PICTURE_BYTES):
        raise BadInput(f"{str(file)!r} has {len(content)} bytes, which are no whole pictures of {1 + _PICTURE_BYTES}")
    table = torch.frombuffer(content, dtype=torch.uint8).view(-1, 1 + _PICTURE_BYTES)
    labels = table[:, 0].long()
    if int(labels.max()) > 9:
        raise BadInput(f"{str(file)!r} has a label {int(labels.max())}, but there are ten; it is no file of CIFAR-10")
    return table[:, 1:].reshape(-1, 3, 32, 32), labels


class Cifar10(Task):
    """One of two nets on CIFAR-10; test accuracy and test loss are its measures.

    net: "alexnet" (2.1M parameters, most in dense layers) or "googlenet" (1.7M in 50 layers, with BatchNorm).
    data: the folder of data (None: the variable QUORATE_DATA, then the user's cache; fetched where it is missing), or
        the training and the test data themselves, as `load_cifar10` gives them.
    lr, momentum, weight_decay: of SGD with Nesterov's momentum. The learning rate is the highest of the schedule.
    updates: the length of the training, over which the learning rate rises for the first `warm_up_share` and falls
        to nothing along a cosine; None: it stays as it is.
    augment: shift and mirror the training pictures.
    precision: "float32", "tf32" or "bfloat16": what a GPU computes products in (None: as torch is set).
    train_samples, test_samples: use the first so many only, for quick looks.
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
        if precision not in (None, *PRECISIONS):
            raise unknown_name("precision", str(precision), PRECISIONS)
        self.net, self.augment, self.precision = net, augment, precision
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._rise_and_fall = RiseAndCosine(updates, warm_up_share)
        train, test = data if isinstance(data, tuple) else load_cifar10(data)
        self._train = _first(train, train_samples, "train_samples")
        self._test = _first(test, test_samples, "test_samples")

    def model(self) -> nn.Module:
        if self.precision is not None:
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        return NETS[self.net]()

    def train_data(self) -> TensorDataset:
        return self._train

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        if self.augment and model.training:
            images = shifted_and_flipped(images)
        return functional.cross_entropy(self._scores(model, images).float(), labels)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.momentum > 0
        )

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.share_of_lr)

    def share_of_lr(self, version: int) -> float:
        """What the learning rate of the next update is multiplied with, after so many."""
        return self._rise_and_fall(version)

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


def _first(data: TensorDataset, samples: int | None, name: str) -> TensorDataset:
    if samples is None:
        return data
    check_at_least(name, samples, 1)
    if samples > len(data):
        raise BadInput(f"{name} is {samples}, but there are {len(data)}")
    return TensorDataset(*(tensor[:samples] for tensor in data.tensors))
