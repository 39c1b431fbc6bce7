"""What the two papers published, to stand beside what we get; `published.json` names the sources.

Figures 3 to 5 of Chen et al. are data of the library, which makes its latency model of them.
"""

from __future__ import annotations

import json
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from quorate.latency.chen2016 import chen2016_figures

_PAPERS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
CHEN: dict[str, Any] = {**chen2016_figures(), **_PAPERS["chen2016"]}
DAILY: dict[str, Any] = _PAPERS["daily2017"]


def shown(value: float, digits: int) -> str:
    """A published number with fewer digits, halves upwards, as people round."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))
