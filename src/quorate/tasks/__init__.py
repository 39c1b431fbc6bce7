"""Ready tasks, for first runs, benchmarks and experiments."""
