"""A small transformer that predicts the next character, on one megabyte of Shakespeare.

Data: tiny-shakespeare, compiled by A. Karpathy (public domain): 1.1 million characters, 65 different ones. The last
tenth is held out for the test.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from quorate.errors import BadInput, check_at_least
from quorate.tasks.files import SingleFiles, files_of
from quorate.tasks.images import RiseAndCosine, ScheduledTask, mean_loss

TINY_SHAKESPEARE = SingleFiles(
    name="tiny-shakespeare",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare",
    files=("tinyshakespeare/input.txt",),
    md5s=("6fb458f1232090904fb40fe944165e91",),
    sizes_bytes=(1_115_394,),
)
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TEST_SHARE = 0.1
#: Samples in one batch of an evaluation.
_AT_ONCE = 256


@cache
def load_shakespeare(data: str | Path | None = None) -> str:
    """The text of tiny-shakespeare.

    data: the folder with `tinyshakespeare/input.txt` (None: the variable QUORATE_DATA, then the user's cache).
    """
    (file,) = files_of(TINY_SHAKESPEARE, data)
    content = file.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise BadInput(f"{str(file)!r} has sha256 {found}, but tiny-shakespeare has {SHA256}; remove it")
    return content.decode()


class CharNet(nn.Module):
    """A causal transformer with pre-norm and learned position embeddings.

    kinds: number of different characters. context: most characters it sees. width, layers, heads: its size.
    """

    def __init__(self, kinds: int, context: int = 64, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        for name, value in (("kinds", kinds), ("context", context), ("layers", layers), ("heads", heads)):
            check_at_least(name, value, 1)
        if width % heads:
            raise BadInput(f"width is {width}, but it must be a multiple of heads ({heads})")
        self.letters = nn.Embedding(kinds, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, kinds)
        for name, tensor in self.named_parameters():
            if tensor.dim() > 1:
                # 2·layers outputs are added to the residual stream; each is scaled by the root of their number.
                nn.init.normal_(tensor, std=0.02 / math.sqrt(2 * layers if name.endswith("out.weight") else 1))

    def forward(self, letters: Tensor) -> Tensor:
        """From characters [n, length] as numbers to scores of the next character, [n, length, kinds]."""
        stream = self.letters(letters) + self.places[: letters.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        scores: Tensor = self.head(self.norm(stream))
        return scores


class _Attention(nn.Module):
    """Causal self-attention without torch's fused kernels, whose backward passes do not sum in a fixed order."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.all = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        n, length, width = stream.shape
        parts = self.all(stream).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(2, 3) * (width // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=stream.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(3)
        seen: Tensor = self.out((weights @ value).transpose(1, 2).reshape(n, length, width))
        return seen


class _Block(nn.Module):
    """Attention, then a two-layer perceptron; both add to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = _Attention(width, heads)
        self.inner, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.norms[0](stream))
        result: Tensor = stream + self.out(functional.gelu(self.inner(self.norms[1](stream))))
        return result


class CharLm(ScheduledTask):
    """Predicts the next character of tiny-shakespeare; measured by "test_loss" in nats and "bits", both per character.

    data: the data folder, as for `load_shakespeare`.
    text: another training text.
    lr, weight_decay: of AdamW. The rate rises over `warm_up_share` of `updates` and falls to a tenth along a cosine;
        it is constant if `updates` is None.
    context, width, layers, heads: of the net. stride: distance between the starts of two samples, in characters.
    test_samples: samples of the held-out text that are evaluated, evenly spread (None: all of it).
    """

    batch_size = 8

    def __init__(
        self,
        data: str | Path | None = None,
        *,
        text: str | None = None,
        lr: float = 2e-3,
        weight_decay: float = 0.01,
        updates: int | None = None,
        warm_up_share: float = 0.05,
        context: int = 64,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
        stride: int = 16,
        test_samples: int | None = 512,
    ) -> None:
        text = load_shakespeare(data) if text is None else text
        self.letters = sorted(set(text))
        self.lr, self.weight_decay = lr, weight_decay
        self._rise_and_fall = RiseAndCosine(updates, warm_up_share, floor=0.1)
        self.context, self.width, self.layers, self.heads = context, width, layers, heads
        numbers = {letter: number for number, letter in enumerate(self.letters)}
        everything = torch.tensor([numbers[letter] for letter in text])
        cut = round(len(text) * (1 - TEST_SHARE))
        if min(cut, len(text) - cut) <= check_at_least("context", context, 1):
            raise BadInput(f"the text has {len(text)} characters, too few for samples of {context} and a test")
        self._train = TensorDataset(windows(everything[:cut], context, check_at_least("stride", stride, 1)))
        test = windows(everything[cut:], context, context)
        if test_samples is not None and check_at_least("test_samples", test_samples, 1) < len(test):
            test = test[torch.linspace(0, len(test) - 1, test_samples).round().long()]
        self._test = test

    def model(self) -> nn.Module:
        return CharNet(len(self.letters), self.context, self.width, self.layers, self.heads)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Nats per character."""
        (letters,) = batch
        scores = model(letters[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), letters[:, 1:].flatten())

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=self.lr, betas=(0.9, 0.99), weight_decay=self.weight_decay)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        nats = mean_loss(self, model, self._test, _AT_ONCE)
        return {"test_loss": nats, "bits": nats / math.log(2)}


def windows(numbers: Tensor, context: int, stride: int) -> Tensor:
    """Samples [n, context + 1] of a text as numbers: the inputs, and shifted by one the targets."""
    return numbers.unfold(0, context + 1, stride).contiguous()
