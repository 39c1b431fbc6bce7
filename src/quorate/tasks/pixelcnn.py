"""A small gated PixelCNN on CIFAR-10, which predicts each colour of each pixel from all earlier ones.

Two stacks avoid blind spots (van den Oord et al. 2016): one sees the rows above, the other the pixels to the left and
the output of the first. Values 0..255 follow mixtures of discretised logistics, and the means of a pixel's green and
blue depend on its earlier colours (Salimans et al. 2017). Training follows Chen et al. (2016): RMSProp, four pictures a
worker.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from quorate.errors import BadInput, check_at_least
from quorate.tasks.cifar10 import Data, load_cifar10
from quorate.tasks.images import ScheduledTask, checked_precision, first_samples, mean_loss, use_precision

COLOURS, VALUES = 3, 256
#: Limits of the logarithmic scales. Beyond them a logistic is narrower than one value or much wider than all values,
#: and floats lose precision.
_LOG_SCALES = (-7.0, 7.0)
#: Pictures in one batch of an evaluation.
_AT_ONCE = 250


class Mixture(NamedTuple):
    """The predicted distribution of every value, [n, colours, mixtures, h, w] each; 0..255 is scaled to −1..1."""

    logits: Tensor
    means: Tensor
    log_scales: Tensor

    def log_probability(self, values: Tensor) -> Tensor:
        """Log-probabilities in nats of values 0..255 [n, colours, h, w], in the same shape.

        σ(b) − σ(a) is computed as σ(b)·σ(−a)·(1 − e^(a−b)), which never cancels. The values 0 and 255 include the
        tails beyond them.
        """
        x = _scaled(values.to(self.means.dtype))[:, :, None]
        lowest, highest = (values == 0)[:, :, None], (values == VALUES - 1)[:, :, None]
        sharpness = torch.exp(-self.log_scales)
        middle, half = (x - self.means) * sharpness, sharpness / (VALUES - 1)
        below = functional.logsigmoid(middle + half).masked_fill(highest, 0.0)
        above = functional.logsigmoid(half - middle).masked_fill(lowest, 0.0)
        between = torch.log(-torch.expm1(-2 * half)).masked_fill(lowest | highest, 0.0)
        return torch.logsumexp(functional.log_softmax(self.logits, 2) + below + above + between, 2)


class PixelNet(nn.Module):
    """The two stacks. The output at a pixel depends only on earlier pixels.

    channels: of each stack. layers: gated layers after the first convolutions. mixtures: logistics per value.
    """

    def __init__(self, channels: int = 48, layers: int = 5, mixtures: int = 5) -> None:
        super().__init__()
        self.mixtures = check_at_least("mixtures", mixtures, 1)
        check_at_least("channels", channels, 1)
        self.first_above = nn.Conv2d(COLOURS, channels, (3, 7))
        self.first_left = nn.Conv2d(COLOURS, channels, (1, 3))
        self.layers = nn.ModuleList(_Gated(channels) for _ in range(check_at_least("layers", layers, 1)))
        # Logits, means, log-scales, and the weights of a pixel's earlier colours.
        self.head = nn.Conv2d(channels, 4 * COLOURS * mixtures, 1)
        with torch.no_grad():
            self.head.weight.mul_(0.1)
            bias = self.head.bias
            assert bias is not None
            _, means, log_scales, added = bias.view(4, COLOURS, mixtures)
            means.copy_(torch.linspace(-0.8, 0.8, mixtures + 2)[1:-1])
            log_scales.fill_(-1.0)
            added.zero_()

    def forward(self, images: Tensor) -> Mixture:
        """From pictures [n, 3, h, w] in 0..255 to the distribution of each value."""
        x = _scaled(images)
        # Shifted by one, so that the upper stack does not see the pixel's own row, nor the left stack the pixel.
        above = self.first_above(functional.pad(x, (3, 3, 3, -1)))
        left = self.first_left(functional.pad(x, (3, -1, 0, 0))) + above
        for layer in self.layers:
            above, left = layer(above, left)
        n, _, height, width = images.shape
        numbers = self.head(functional.elu(left)).view(n, 4, COLOURS, self.mixtures, height, width)
        logits, means, log_scales, added = numbers.unbind(1)
        red, green = x[:, 0, None], x[:, 1, None]
        added = torch.tanh(added)
        means = means + torch.stack(
            [torch.zeros_like(added[:, 0]), added[:, 0] * red, added[:, 1] * red + added[:, 2] * green], 1
        )
        return Mixture(logits, means, log_scales.clamp(*_LOG_SCALES))


class _Gated(nn.Module):
    """One gated residual layer of both stacks; the left stack also reads the upper stack."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.above = nn.Conv2d(channels, 2 * channels, (2, 3))
        self.left = nn.Conv2d(channels, 2 * channels, (1, 2))
        self.link = nn.Conv2d(channels, 2 * channels, 1)

    def forward(self, above: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        above = above + functional.glu(self.above(functional.pad(functional.elu(above), (1, 1, 1, 0))), 1)
        seen = self.left(functional.pad(functional.elu(left), (1, 0, 0, 0))) + self.link(functional.elu(above))
        return above, left + functional.glu(seen, 1)


class PixelCnn(ScheduledTask):
    """A gated PixelCNN on CIFAR-10, measured by the test NLL in bits per dimension ("nll"); less is better.

    data: as in `Cifar10`; labels are ignored.
    lr: of RMSProp (0.95, momentum 0.9). It rises over the first `warm_up_share` of `updates`, since RMSProp's first
        steps are its longest. At `drop_share` it falls to `final_share` of itself, as in the paper (1e-4, then 3e-6).
        It is constant if `updates` is None.
    channels, layers, mixtures: of the net.
    precision: "float32" or "tf32", as in `Cifar10`.
    train_samples, test_samples: use only this many first samples (None: all of them).
    """

    batch_size = 4

    def __init__(
        self,
        data: Data = None,
        *,
        lr: float = 1e-3,
        updates: int | None = None,
        warm_up_share: float = 0.02,
        drop_share: float = 0.8,
        final_share: float = 0.03,
        channels: int = 48,
        layers: int = 5,
        mixtures: int = 5,
        precision: str | None = None,
        train_samples: int | None = None,
        test_samples: int | None = 500,
    ) -> None:
        if updates is not None:
            check_at_least("updates", updates, 1)
        if not 0 <= warm_up_share <= drop_share <= 1:
            raise BadInput(
                f"warm_up_share is {warm_up_share} and drop_share {drop_share}, "
                f"but shares of a training are 0 to 1, in this order"
            )
        self.lr, self.updates, self.final_share = lr, updates, final_share
        self.warm_up_share, self.drop_share = warm_up_share, drop_share
        self.channels, self.layers, self.mixtures = channels, layers, mixtures
        self.precision = checked_precision(precision)
        train, test = data if isinstance(data, tuple) else load_cifar10(data)
        self._train = TensorDataset(first_samples(train, train_samples, "train_samples").tensors[0])
        self._test = first_samples(test, test_samples, "test_samples").tensors[0]

    def model(self) -> nn.Module:
        use_precision(self.precision)
        return PixelNet(self.channels, self.layers, self.mixtures)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Bits per dimension."""
        (images,) = batch
        mixture: Mixture = model(images)
        return -mixture.log_probability(images).mean() / math.log(2)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(params, lr=self.lr, alpha=0.95, momentum=0.9)

    def share_of_lr(self, version: int) -> float:
        if self.updates is None:
            return 1.0
        if version >= self.drop_share * self.updates:
            return self.final_share
        return min(1.0, (version + 1) / (self.warm_up_share * self.updates + 1))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"nll": mean_loss(self, model, self._test, _AT_ONCE)}


@torch.no_grad()
def sample(model: nn.Module, count: int, size: int = 32) -> Tensor:
    """Pictures [count, 3, size, size] as bytes, drawn pixel by pixel with torch's generator on the model's device."""
    device = next(model.parameters()).device
    images = torch.zeros(count, COLOURS, size, size, dtype=torch.uint8, device=device)
    for row in range(size):
        for column in range(size):
            for colour in range(COLOURS):
                # Rows below do not influence this one, so they are not computed.
                at = _pixel(model(images[:, :, : row + 1]), row, column)
                chances = all_log_probabilities(at)[:, :, colour, 0, 0].exp()
                images[:, colour, row, column] = torch.multinomial(chances, 1)[:, 0].to(torch.uint8)
    return images


def all_log_probabilities(mixture: Mixture) -> Tensor:
    """The log-probability of every value 0..255, [n, 256, colours, h, w]."""
    n, colours, _, height, width = mixture.means.shape
    values = torch.arange(VALUES, dtype=torch.uint8, device=mixture.means.device).repeat(n)
    every = Mixture(*(tensor.repeat_interleave(VALUES, 0) for tensor in mixture))
    found = every.log_probability(values[:, None, None, None].expand(-1, colours, height, width))
    return found.view(n, VALUES, colours, height, width)


def _pixel(mixture: Mixture, row: int, column: int) -> Mixture:
    return Mixture(*(tensor[..., row : row + 1, column : column + 1] for tensor in mixture))


def _scaled(values: Tensor) -> Tensor:
    """0..255 scaled to −1..1."""
    return (values if values.is_floating_point() else values.float()) / ((VALUES - 1) / 2) - 1
