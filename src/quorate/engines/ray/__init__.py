"""Workers, learner shards and their keeper as Ray actors: the same run on many machines that come and go."""

from quorate.engines.ray.engine import Ray

__all__ = ["Ray"]
