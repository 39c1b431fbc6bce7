"""Step times of a script that does not use quorate yet: each process's own, without its waiting for the others."""

from quorate.measuring.block import Measuring, measure

__all__ = ["Measuring", "measure"]
