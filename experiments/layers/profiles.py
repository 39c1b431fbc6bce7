"""How much of a step each layer takes, bottom first."""

from __future__ import annotations

LAYERS = 18

#: Multiplications (in millions) of Inception v3 on 299×299 pictures, stage by stage, counted from its shapes: five
#: convolutions, the blocks 5b to 5d, 6a to 6e and 7a to 7c, and the classifier. 17 stages; the paper counts 18 layers.
INCEPTION_V3 = (
    *(19.2, 199.1, 398.3, 27.3, 697.0),
    *(312.3, 338.7, 348.1),
    *(402.0, 374.1, 487.7, 487.7, 617.9),
    *(291.0, 322.4, 388.5),
    2.0,
)

PROFILES: dict[str, tuple[float, ...]] = {
    "equal": (1.0,) * LAYERS,
    "Inception v3 by multiplications": INCEPTION_V3,
    "bottom heavy": tuple(float(LAYERS - place) ** 2 for place in range(LAYERS)),
    "top heavy": tuple(float(place + 1) ** 2 for place in range(LAYERS)),
}
