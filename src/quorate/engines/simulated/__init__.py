"""The simulated engine: a cluster that exists only in virtual time."""
