"""Ray engine: workers, learner shards and the evaluator are Ray actors, on machines that may come and go."""

from quorate.engines.ray.engine import Ray

__all__ = ["Ray"]
