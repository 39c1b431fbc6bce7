"""Sizes of the tensors of three well-known models, of about 25M, 350M and 7B parameters."""

from __future__ import annotations

from quorate.engines.ray.shard import cut


def resnet50() -> list[int]:
    """He et al. 2015, 1,000 classes: 25.6M parameters."""
    sizes = [64 * 3 * 49, 64, 64]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for weight, channels in (
                (inside * width, width),
                (width * width * 9, width),
                (width * width * 4, width * 4),
            ):
                sizes += [weight, channels, channels]
            if block == 0:
                sizes += [inside * width * 4, width * 4, width * 4]
            inside = width * 4
    return [*sizes, 2048 * 1000, 1000]


def gpt2_medium() -> list[int]:
    """Radford et al. 2019, 24 layers of width 1,024; the output shares the embedding: 355M parameters."""
    d = 1024
    layer = [d, d, d * 3 * d, 3 * d, d * d, d, d, d, d * 4 * d, 4 * d, 4 * d * d, d]
    return [50257 * d, 1024 * d, *(layer * 24), d, d]


def llama_7b() -> list[int]:
    """Touvron et al. 2023, 32 layers of width 4,096: 6.7B parameters."""
    d, hidden, words = 4096, 11008, 32000
    layer = [d * d] * 4 + [d * hidden] * 3 + [d, d]
    return [words * d, *(layer * 32), d, words * d]


MODELS = {"ResNet-50": resnet50, "GPT-2 medium": gpt2_medium, "LLaMA 7B": llama_7b}


def busiest_shard(sizes: list[int], shards: int) -> int:
    """Parameters of the largest shard, as the Ray engine cuts."""
    return max(sum(sizes[part]) for part in cut(sizes, shards))
