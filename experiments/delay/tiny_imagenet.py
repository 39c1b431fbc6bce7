"""Tiny-ImageNet's first 20 classes at 32×32 pixels: 10,000 training pictures and 1,000 to test with, in one file.

    python -m experiments.delay.tiny_imagenet FROM DIR

FROM holds the unpacked archive, `tiny-imagenet-200/train` and `tiny-imagenet-200/val`. The command writes
DIR/tiny-imagenet-20.pt (34 MB), which `--data DIR` of the experiment then finds. Only this command needs Pillow.

The pictures are JPEG files of 64×64, here halved by the mean of 2×2 pixels. Their test set has no public labels, so
that the published validation pictures are the test set. They may be used for research and not be published.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from quorate.errors import BadInput
from quorate.tasks.files import data_folder

NAME = "tiny-imagenet-20"
CLASSES, SIZE = 20, 32
_FOLDER = "tiny-imagenet-200"
_KEYS = ("train_pictures", "train_labels", "test_pictures", "test_labels")


def file_of(data: Path | None) -> Path:
    """Where the pictures are expected; the data folder is chosen as for the other data sets."""
    return data_folder(data) / f"{NAME}.pt"


def load(data: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test data: pictures as bytes [n, 3, 32, 32], and labels [n]."""
    return _load(file_of(data))


@cache
def _load(file: Path) -> tuple[TensorDataset, TensorDataset]:
    try:
        found: dict[str, Tensor] = torch.load(file, weights_only=True)
        train, test = (TensorDataset(found[f"{part}_pictures"], found[f"{part}_labels"]) for part in ("train", "test"))
    except Exception as error:  # torch raises many kinds for a file that is not one of its own
        raise BadInput(
            f"{str(file)!r} cannot be read as pictures ({type(error).__name__}); "
            "make it again: python -m experiments.delay.tiny_imagenet FROM DIR"
        ) from error
    return train, test


def pack(source: Path, folder: Path) -> Path:
    """Read the JPEG files of the first classes, and write them into one file of the data folder."""
    root = source / _FOLDER
    train, notes = root / "train", root / "val" / "val_annotations.txt"
    if not train.is_dir() or not notes.is_file():
        raise BadInput(
            f"{str(root)!r} has no train and val/val_annotations.txt; unpack the archive and name its folder"
        )
    classes = sorted(one.name for one in train.iterdir() if one.is_dir())[:CLASSES]
    of_class = {name: label for label, name in enumerate(classes)}
    trained = [
        (file, label) for name, label in of_class.items() for file in sorted((train / name / "images").glob("*.JPEG"))
    ]
    lines = [line.split("\t") for line in notes.read_text().splitlines()]
    tested = [(root / "val" / "images" / line[0], of_class[line[1]]) for line in lines if line[1] in of_class]
    if len(classes) < CLASSES or not tested:
        raise BadInput(
            f"{str(root)!r} has {len(classes)} classes and {len(tested)} pictures to test with; it is not whole"
        )
    parts = [tensor for some in (trained, tested) for tensor in _read(some)]
    file = folder / f"{NAME}.pt"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(zip(_KEYS, parts, strict=True)), file)
    return file


def _read(files: Iterable[tuple[Path, int]]) -> tuple[Tensor, Tensor]:
    """Pictures [n, 3, 32, 32] as bytes and labels [n]. Grey pictures get three equal planes."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BadInput("reading JPEG files needs Pillow: pip install pillow") from error
    pictures, labels = [], []
    for file, label in files:
        with Image.open(file) as image:
            halved = image.convert("RGB").reduce(2)
        pictures.append(torch.frombuffer(bytearray(halved.tobytes()), dtype=torch.uint8).view(SIZE, SIZE, 3))
        labels.append(label)
    return torch.stack(pictures).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.delay.tiny_imagenet", description=__doc__)
    parser.add_argument("source", type=Path, metavar="FROM", help=f"folder that has {_FOLDER}")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the data folder")
    given = parser.parse_args()
    try:
        print(pack(given.source, given.folder))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
