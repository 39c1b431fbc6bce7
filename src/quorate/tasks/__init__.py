"""Ready-made tasks for first runs, benchmarks and experiments."""
