"""When async wins: a map over the tail of times, lasting unevenness of workers, and gradient noise."""
