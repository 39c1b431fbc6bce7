"""Test error against staleness, on MNIST."""
