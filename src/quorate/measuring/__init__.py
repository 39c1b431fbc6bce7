"""Step times of a training script that does not use quorate, without the time a process waits for the others."""

from quorate.measuring.measure import Measuring, measure

__all__ = ["Measuring", "measure"]
